"""A page of the browser, as environments use it: open, look, act.

Every question to the page is bounded: a page is a program of someone else's that may hang, crash or
go away at any moment, and an episode must end then, with the reason as its class of failure.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from playwright.async_api import Dialog, Download, Error, async_playwright  # pyright: ignore[reportMissingImports]
from playwright.async_api import Page as Tab  # pyright: ignore[reportMissingImports]
from playwright.async_api import TimeoutError as LoadTimeout  # pyright: ignore[reportMissingImports]

from arealite.api.browser_config import BrowserConfig
from arealite.base.errors import DeadlineError, EpisodeError
from arealite.impl.browser.actions import BadAction, Command, destination, origin
from arealite.system.health.waits import Wait

__all__ = ["Error", "Page", "View", "async_playwright"]

SCRIPT = Path(__file__).with_name("page.js")
DESCRIBE = "asked => window.__arealite?.describe(asked) ?? {url: location.href}"
ACT = "([verb, id, text]) => window.__arealite?.act(verb, id, text) ?? {}"
LEFT = "() => window.__arealite?.left()"
STAY = "() => window.__arealite?.stay()"
MAX_REPLACED = 20
MAX_NOTES = 5
"""Between two looks; a page may open dialogs for ever."""
MAX_KEYS = 200
"""A longer text is put in at once, without key events."""


class PageTimeout(EpisodeError):
    """The task's page did not load, or a page did not answer, in time."""

    failure_class = "page_timeout"


class PageError(EpisodeError):
    """The task's page could not be loaded, or fails what is done to it."""

    failure_class = "page_error"


class BrowserCrash(EpisodeError):
    """The page or the whole browser died."""

    failure_class = "browser_crash"


class View(msgspec.Struct):
    """What a page shows. Filled by page.js."""

    text: str = "(an empty page)"
    title: str = ""
    url: str = ""
    choices: list[str] = []
    state: list[Any] = []
    """The page's variables that were asked for, in order; None where it has none of the name."""
    leaving: bool = False
    """The page is about to be replaced by another."""


class Page:
    """One tab in a context of its own; what it opens besides is closed at once."""

    def __init__(self, tab: Tab, config: BrowserConfig, allowed: Collection[str]) -> None:
        self.tab = tab
        self.config = config
        self.allowed = allowed
        self.notes: list[str] = []
        """What happened that the page does not show; whoever tells the agent empties it."""
        self.crashed = False
        self.uses = 0
        """Episodes that are over."""
        tab.on("crash", self._crash)
        tab.on("dialog", self._dismiss)
        tab.on("download", self._refuse)
        tab.context.on("page", self._close)

    @property
    def is_alive(self) -> bool:
        """Whether it can be used again."""
        browser = self.tab.context.browser
        alive = browser is not None and browser.is_connected()
        return alive and not self.crashed and not self.tab.is_closed()

    async def open(self, url: str) -> None:
        """Load the task's own page.

        Raises:
            PageTimeout, PageError, BrowserCrash: it cannot be had.
        """
        self.notes.clear()
        if origin(url) not in self.allowed:  # such as file://, in a task of someone else's
            raise PageError(f"{url[:200]} is not on a site of this task")
        try:
            async with self.asking(f"the page {url}"):
                await self.tab.goto(url, timeout=0)
        except Error as error:
            raise PageError(f"{url}: {first_line(error)}") from error

    async def evaluate(self, script: str, *given: Any) -> Any:
        """Return what a script of the environment's own gives; raises as `open` does."""
        try:
            async with self.asking("the page's answer"):
                return await self.tab.evaluate(script, *given)
        except Error as error:
            raise PageError(first_line(error)) from error

    async def look(self, skip: str = "", names: Collection[str] = ()) -> View:
        """Return what the page shows, without elements that the selector `skip` fits, and the
        values of its variables `names`; a page that is being replaced is awaited."""
        asked = {"limit": self.config.max_chars, "skip": skip, "names": [*names]}
        asked["settle"] = self.config.settle_ms
        stayed = False
        for _ in range(MAX_REPLACED):
            try:
                async with self.asking("the page's description"):
                    view = msgspec.convert(await self.tab.evaluate(DESCRIBE, asked), View)
                    if not view.leaving:
                        return view
                    await self.tab.evaluate(LEFT)
            except PageTimeout:
                if stayed:
                    raise
                stayed = True
                await self._stay("the next page does not load; it was given up")
            except Error:  # the page was replaced meanwhile
                with suppress(Error):
                    await self.tab.wait_for_load_state(timeout=1000 * self.config.timeout_s)
        raise PageTimeout(f"{self.tab.url} is replaced again and again")

    async def _stay(self, note: str) -> None:
        """End a navigation that comes to nothing; while it is under way, no script runs."""
        self._note(note)
        async with self.asking("the end of a navigation"):
            with suppress(Error):
                session = await self.tab.context.new_cdp_session(self.tab)
                await session.send("Page.stopLoading")
                await session.detach()
                await self.tab.evaluate(STAY)

    async def perform(self, command: Command) -> None:
        """Carry out an action, and wait for nothing that it causes.

        Raises:
            BadAction: it cannot be done; the page is as it was.
            PageError: the page's own script fails it.
        """
        if command.verb == "goto":
            return await self._goto(command.text)
        async with self.asking(f"{command.verb} on the page"):
            try:
                if command.verb == "press":
                    return await self.tab.keyboard.press(command.text)
                answer = await self.tab.evaluate(ACT, [*msgspec.structs.astuple(command)])
                if "error" in answer:
                    raise BadAction(answer["error"])
                await self._input(answer)
            except Error as error:
                if not self.is_alive:
                    raise
                if "Unknown key" in first_line(error):
                    raise BadAction(f"there is no key {json.dumps(command.text)}") from error
                raise PageError(first_line(error)) from error
        return None

    async def _input(self, answer: dict[str, Any]) -> None:
        """Do by mouse or keyboard what the page has prepared."""
        keyboard = self.tab.keyboard
        if "at" in answer:
            await self.tab.mouse.click(*answer["at"])
        elif answer.get("keys") == "":
            await keyboard.press("Delete")
        elif len(answer.get("keys", "")) > MAX_KEYS:
            await keyboard.insert_text(answer["keys"])
        elif "keys" in answer:
            await keyboard.type(answer["keys"])

    async def _goto(self, url: str) -> None:
        whole = destination(url, base=self.tab.url, allowed=self.allowed)
        try:
            await self.tab.goto(whole, timeout=1000 * self.config.timeout_s)
        except Error as error:
            if not self.is_alive:
                raise BrowserCrash(first_line(error)) from error
            why = "does not load" if isinstance(error, LoadTimeout) else "cannot be loaded"
            await self._stay(f"{whole} {why}; it was given up")

    async def close(self) -> None:
        """Close the tab and its context; one that does not answer goes with the browser."""
        wait = Wait("the end of a page", owner="browser", on="chromium", seconds=5.0)
        with suppress(Error, DeadlineError, RuntimeError), wait:
            await self.tab.context.close()

    @asynccontextmanager
    async def asking(self, what: str) -> AsyncGenerator[None, None]:
        """Bound the body's time, and name what the death of page or browser does to it."""
        seconds = self.config.timeout_s
        try:
            with Wait(what, owner="browser", on="chromium", seconds=seconds):
                yield
        except DeadlineError as error:
            raise PageTimeout(f"{what} did not come within {seconds} s") from error
        except Error as error:
            self.crashed |= type(error).__name__ == "TargetClosedError"  # the driver is dead, too
            if self.is_alive:
                raise
            raise BrowserCrash(first_line(error)) from error
        except RuntimeError as error:  # of uvloop: there is no pipe to the driver any more
            self.crashed = True
            raise BrowserCrash(f"the browser's driver is gone: {error}") from error

    def _note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def _crash(self, _: Tab) -> None:
        self.crashed = True

    async def _dismiss(self, dialog: Dialog) -> None:
        if dialog.type != "beforeunload":
            self._note(f"the page said {json.dumps(dialog.message[:200])}; it was dismissed")
        with suppress(Error):
            await (dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())

    async def _refuse(self, _: Download) -> None:
        with suppress(EpisodeError):
            await self._stay("a download was refused")

    async def _close(self, tab: Tab) -> None:
        if tab is not self.tab:
            with suppress(Error):
                await tab.close()


def first_line(error: Exception) -> str:
    """Return what Playwright says, without its log."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
