"""One headless Chromium per worker, and a page with its own context for each episode.

A browser costs a hundred times as much as a context in it, so a worker has one browser. Each page
has its own context, so concurrent episodes share no cookies. The browser can reach only the task's
hosts: its resolver refuses all other names, and a page cannot change that.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from arealite.base import log
from arealite.base.errors import DeadlineError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.web.browser.actions import origin
from arealite.ext.web.config import BrowserConfig
from arealite.system.health.waits import Wait

if TYPE_CHECKING:
    from playwright.async_api import Browser as Chromium  # pyright: ignore[reportMissingImports]
    from playwright.async_api import Playwright, StorageState, ViewportSize  # pyright: ignore[reportMissingImports]

    from arealite.ext.web.browser.page import Page

logger = log.get(__name__)

START_S = 60.0
STOP_S = 10.0
MAX_USES = 500
"""Episodes of a context before it is replaced: data that pages leave in a context adds up."""
ARGUMENTS = (
    "--no-proxy-server",  # a proxy could resolve the names that the browser refuses
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-gpu",
    "--disable-threaded-compositing",  # saves a third of the CPU time of each step
    "--num-raster-threads=1",
)
VIEWPORT: ViewportSize = {"width": 1024, "height": 768}


class Browser:
    """Lends pages that can reach only `sites`, the addresses of the task's hosts."""

    def __init__(self, config: BrowserConfig, sites: Sequence[str]) -> None:
        self.config = config
        self.allowed = {origin(site) for site in sites}
        """`host:port` of each site."""
        self._slots = asyncio.Semaphore(config.contexts)
        self._idle: list[Page] = []
        self._lock = asyncio.Lock()
        self._playwright: Playwright | None = None
        self._chromium: Chromium | None = None
        self._errors: tuple[type[Exception], ...] = ()

    async def setup(self) -> None:
        """Start the browser.

        Raises:
            UserError: Playwright or Chromium is not installed, or the browser does not start.
        """
        if shutil.which(self.config.executable) is None:
            raise UserError(
                f"browser.executable={self.config.executable}: program not found. "
                "Install Debian's package chromium-headless-shell, "
                "or set the path of another Chromium."
            )
        import_optional("playwright", extra_requirement("browser"))
        self._pages: Any = await asyncio.to_thread(import_module, "arealite.ext.web.browser.page")
        self._errors = (self._pages.Error, DeadlineError)
        self._script = await asyncio.to_thread(self._pages.SCRIPT.read_text)
        try:
            await self._ensure_browser()
        except self._errors as error:
            reason = self._pages.first_line(error)
            raise UserError(
                f"browser.executable={self.config.executable} does not start: {reason}. "
                "Set the path of a Chromium that starts on this host."
            ) from error

    async def close(self) -> None:
        """Stop the browser."""
        async with self._lock:
            await self._stop()

    @asynccontextmanager
    async def page(self, storage_state: StorageState | str | None = None) -> AsyncGenerator[Page]:
        """Acquire a page for an episode; wait until a page is free.

        Args:
            storage_state: Cookies in Playwright's format, or their file; {} for none. The page
                then has a new context. None: the page may be a reused one.

        Yields:
            The page.

        Raises:
            BrowserCrash: The browser died and does not start again.
        """
        with Wait(event="a free page", owner="browser", on="other episodes"):
            await self._slots.acquire()
        try:
            page = await self._take(storage_state)
            is_reusable = False
            try:
                yield page
                page.uses += 1
                is_reusable = storage_state is None and page.is_alive and page.uses < MAX_USES
            finally:
                if is_reusable:
                    self._idle.append(page)
                else:
                    await self._drop(page)
        finally:
            self._slots.release()

    async def _drop(self, page: Page) -> None:
        """Close a page. If it crashed, the browser may be dead: close all idle pages, too."""
        pages = [page]
        if page.crashed:
            pages += self._idle
            self._idle = []
        await asyncio.gather(*(closed_page.close() for closed_page in pages))

    async def _take(self, storage_state: StorageState | str | None) -> Page:
        while storage_state is None and self._idle:
            page = self._idle.pop()
            if page.is_alive:
                return page
        for is_last in (False, True):
            chromium = self._chromium
            try:
                chromium = await self._ensure_browser()
                with Wait(event="a new page", owner="browser", on="chromium", seconds=START_S):
                    return await self._new_page(chromium, storage_state)
            except self._errors as error:
                reason = self._pages.first_line(error)
                if is_last:
                    raise self._pages.BrowserCrash(
                        f"the browser does not start again: {reason}"
                    ) from error
                await self._abandon(chromium, reason)
        raise AssertionError("the second attempt returns or raises")

    async def _new_page(self, chromium: Chromium, storage_state: StorageState | str | None) -> Page:
        context = await chromium.new_context(
            viewport=VIEWPORT,
            accept_downloads=False,
            service_workers="block",
            reduced_motion="reduce",
            storage_state=storage_state or None,
        )
        await context.add_init_script(self._script)
        return self._pages.Page(await context.new_page(), self.config, self.allowed)

    async def _ensure_browser(self) -> Chromium:
        """Return the running browser; start a new one if it has died."""
        async with self._lock:
            if self._chromium is not None and self._chromium.is_connected():
                return self._chromium
            await self._stop()
            with Wait(event="the browser's start", owner="browser", on="chromium", seconds=START_S):
                playwright = await self._pages.async_playwright().start()
                self._playwright = playwright
                chromium = await playwright.chromium.launch(
                    executable_path=shutil.which(self.config.executable),
                    chromium_sandbox=self.config.sandbox,
                    args=[*ARGUMENTS, f"--host-resolver-rules={self._resolver_rules()}"],
                )
                self._chromium = chromium
            logger.info("browser started", version=chromium.version, sites=len(self.allowed))
            return chromium

    def _resolver_rules(self) -> str:
        """Return rules by which the browser resolves only the names of the task's hosts."""
        rules = [f"MAP {site} {site}" for site in sorted(self.allowed)]
        return ",".join([*rules, "MAP * ~NOTFOUND"])

    async def _abandon(self, chromium: Chromium | None, reason: str) -> None:
        """Stop a browser that failed, unless another episode has already stopped it."""
        async with self._lock:
            if self._chromium is chromium:
                logger.warning("browser died", error=reason)
                await self._stop()

    async def _stop(self) -> None:
        self._idle.clear()
        chromium = self._chromium
        self._chromium = None
        playwright = self._playwright
        self._playwright = None
        if chromium is not None:
            await self._until_ended(chromium.close())
        if playwright is not None:
            await self._until_ended(playwright.stop())

    async def _until_ended(self, ending: Awaitable[None]) -> None:
        """Wait until the browser or its driver has ended; ignore its errors."""
        wait = Wait(event="the browser's end", owner="browser", on="chromium", seconds=STOP_S)
        with suppress(*self._errors), wait:
            await ending
