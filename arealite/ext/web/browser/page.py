"""A page of the browser: open an address, describe the page as text, perform actions.

A page runs untrusted scripts that may hang, crash or navigate at any moment. So every request to it
has a deadline, and a failed request fails the episode with a failure class for its reason.
"""

import json
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from playwright.async_api import Dialog, Download, Error, async_playwright  # pyright: ignore[reportMissingImports]
from playwright.async_api import Page as Tab  # pyright: ignore[reportMissingImports]
from playwright.async_api import TimeoutError as LoadTimeout  # pyright: ignore[reportMissingImports]

from arealite.base.errors import DeadlineError, EpisodeError
from arealite.ext.web.browser.actions import BadAction, PageAction, destination, origin
from arealite.ext.web.config import BrowserConfig
from arealite.system.health.waits import Wait

__all__ = ["Error", "Page", "View", "async_playwright"]

SCRIPT = Path(__file__).with_name("page.js")
DESCRIBE = "asked => window.__arealite?.describe(asked) ?? {url: location.href}"
ACT = "([verb, id, text]) => window.__arealite?.act(verb, id, text) ?? {}"
LEFT = "() => window.__arealite?.left()"
STAY = "() => window.__arealite?.stay()"
MAX_REPLACED = 20
MAX_NOTES = 5
"""Notes per observation; a page may open dialogs without end."""
MAX_KEYS = 200
"""A longer text is inserted at once, without key events."""


class PageTimeout(EpisodeError, failure_class="page_timeout"):
    """A page did not load or answer within `timeout_s`."""


class PageError(EpisodeError, failure_class="page_error"):
    """The task's page could not be loaded, or its script raised an error during an action."""


class BrowserCrash(EpisodeError, failure_class="browser_crash"):
    """The page or the whole browser died."""


class View(msgspec.Struct, kw_only=True):
    """The description of a page, made by page.js."""

    text: str = "(an empty page)"
    title: str = ""
    url: str = ""
    choices: list[str] = []
    state: list[Any] = []
    """Values of the requested variables of the page, in order; None for a missing one."""
    leaving: bool = False
    """The page is navigating to another page."""


class Page:
    """One tab in its own browser context. Further tabs that the page opens are closed at once."""

    def __init__(self, tab: Tab, config: BrowserConfig, allowed: Collection[str]) -> None:
        self.tab = tab
        self.config = config
        self.allowed = allowed
        self.notes: list[str] = []
        """Events that the page's text does not show; the next observation shows and clears them."""
        self.crashed = False
        self.uses = 0
        """Number of finished episodes."""
        tab.on("crash", self._crash)
        tab.on("dialog", self._dismiss)
        tab.on("download", self._refuse)
        tab.context.on("page", self._close)

    @property
    def is_alive(self) -> bool:
        """Whether the page can be used again."""
        browser = self.tab.context.browser
        alive = browser is not None and browser.is_connected()
        return alive and not self.crashed and not self.tab.is_closed()

    async def open(self, url: str) -> None:
        """Load the first page of a task.

        Raises:
            PageTimeout: The page did not load within `timeout_s`.
            PageError: The address is not on a site of the task, or the page could not be loaded.
            BrowserCrash: The page or the browser died.
        """
        self.notes.clear()
        if origin(url) not in self.allowed:  # for instance file://, in an untrusted task
            raise PageError(f"{url[:200]} is not on a site of this task")
        try:
            async with self.asking(f"the page {url}"):
                await self.tab.goto(url, timeout=0)
        except Error as error:
            raise PageError(f"{url}: {first_line(error)}") from error

    async def evaluate(self, script: str, *argument: Any) -> Any:
        """Run a script of the environment in the page; return its value. Raises as `open` does."""
        try:
            async with self.asking("the page's answer"):
                return await self.tab.evaluate(script, *argument)
        except Error as error:
            raise PageError(first_line(error)) from error

    async def look(self, skip: str = "", names: Collection[str] = ()) -> View:
        """Return a description of the page. During a navigation, wait for the next page.

        Args:
            skip: CSS selector of elements to leave out.
            names: Variables of the page to read into `View.state`.
        """
        request = {
            "limit": self.config.max_chars,
            "skip": skip,
            "names": [*names],
            "settle": self.config.settle_ms,
        }
        is_stopped = False
        for _ in range(MAX_REPLACED):
            try:
                async with self.asking("the page's description"):
                    description = await self.tab.evaluate(DESCRIBE, request)
                    view = msgspec.convert(description, View)
                    if not view.leaving:
                        return view
                    await self.tab.evaluate(LEFT)
            except PageTimeout:
                if is_stopped:
                    raise
                is_stopped = True
                await self._stop_loading("the next page does not load; it was given up")
            except Error:  # another page was loaded during the call
                with suppress(Error):
                    await self.tab.wait_for_load_state(timeout=1000 * self.config.timeout_s)
        raise PageTimeout(f"{self.tab.url} navigated {MAX_REPLACED} times without stopping")

    async def _stop_loading(self, note: str) -> None:
        """Stop a navigation that does not finish. No script runs while a page navigates."""
        self._note(note)
        async with self.asking("the end of a navigation"):
            with suppress(Error):
                session = await self.tab.context.new_cdp_session(self.tab)
                await session.send("Page.stopLoading")
                await session.detach()
                await self.tab.evaluate(STAY)

    async def perform(self, command: PageAction) -> None:
        """Perform an action, without waiting for its effects.

        Raises:
            BadAction: The action is not possible; the page is unchanged.
            PageError: A script of the page raised an error.
        """
        if command.verb == "goto":
            return await self._goto(command.argument)
        async with self.asking(f"{command.verb} on the page"):
            try:
                if command.verb == "press":
                    return await self.tab.keyboard.press(command.argument)
                answer = await self.tab.evaluate(ACT, [*msgspec.structs.astuple(command)])
                if "error" in answer:
                    raise BadAction(answer["error"])
                await self._input(answer)
            except Error as error:
                if not self.is_alive:
                    raise
                if "Unknown key" in first_line(error):
                    raise BadAction(f"there is no key {json.dumps(command.argument)}") from error
                raise PageError(first_line(error)) from error
        return None

    async def _input(self, answer: dict[str, Any]) -> None:
        """Send the mouse or keyboard input that page.js answered with."""
        keyboard = self.tab.keyboard
        if "at" in answer:
            await self.tab.mouse.click(*answer["at"])
            return
        keys = answer.get("keys")
        if keys is None:
            return
        if keys == "":
            await keyboard.press("Delete")
        elif len(keys) > MAX_KEYS:
            await keyboard.insert_text(keys)
        else:
            await keyboard.type(keys)

    async def _goto(self, url: str) -> None:
        absolute_url = destination(url, base=self.tab.url, allowed=self.allowed)
        try:
            await self.tab.goto(absolute_url, timeout=1000 * self.config.timeout_s)
        except Error as error:
            if not self.is_alive:
                raise BrowserCrash(first_line(error)) from error
            problem = "does not load" if isinstance(error, LoadTimeout) else "cannot be loaded"
            await self._stop_loading(f"{absolute_url} {problem}; it was given up")

    async def close(self) -> None:
        """Close the tab and its context; if they do not answer, they are left to the browser."""
        wait = Wait(event="the end of a page", owner="browser", on="chromium", seconds=5.0)
        with suppress(Error, DeadlineError, RuntimeError), wait:
            await self.tab.context.close()

    @asynccontextmanager
    async def asking(self, reply_name: str) -> AsyncGenerator[None, None]:
        """Give the body a deadline, and turn the death of page or browser into a BrowserCrash.

        Args:
            reply_name: Name of the event that the body waits for, for errors and `arealite why`.
        """
        timeout_s = self.config.timeout_s
        try:
            with Wait(event=reply_name, owner="browser", on="chromium", seconds=timeout_s):
                yield
        except DeadlineError as error:
            raise PageTimeout(f"{reply_name} did not come within timeout_s={timeout_s}") from error
        except Error as error:
            if type(error).__name__ == "TargetClosedError":  # the driver died
                self.crashed = True
            if self.is_alive:
                raise
            raise BrowserCrash(first_line(error)) from error
        except RuntimeError as error:  # raised by uvloop: the pipe to the driver is closed
            self.crashed = True
            raise BrowserCrash(f"the browser's driver died: {error}") from error

    def _note(self, note: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)

    def _crash(self, _: Tab) -> None:
        self.crashed = True

    async def _dismiss(self, dialog: Dialog) -> None:
        """Dismiss a dialog. The question whether to leave the page is accepted, without a note."""
        if dialog.type == "beforeunload":
            with suppress(Error):
                await dialog.accept()
            return
        self._note(f"the page said {json.dumps(dialog.message[:200])}; it was dismissed")
        with suppress(Error):
            await dialog.dismiss()

    async def _refuse(self, _: Download) -> None:
        with suppress(EpisodeError):
            await self._stop_loading("a download was refused")

    async def _close(self, tab: Tab) -> None:
        if tab is not self.tab:
            with suppress(Error):
                await tab.close()


def first_line(error: Exception) -> str:
    """Return the first line of an error of Playwright; its log follows."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
