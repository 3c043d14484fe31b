"""The browser: its pool of pages, crashes and restarts, and the hosts that it cannot reach."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from arealite.base.errors import UserError
from arealite.ext.web.browser.actions import BadAction, parse
from arealite.ext.web.browser.chromium import Browser
from arealite.ext.web.config import BrowserConfig
from tests.ext.web.browser.sites import needs_chromium, serving
from tests.waiting import eventually

pytestmark = pytest.mark.processes

PAGE = "<title>Here</title><p>hello</p>"
FOR_EVER = "() => new Promise(() => {})"


@pytest.fixture
async def world():
    async with serving({"/": PAGE}) as site:
        browser = Browser(BrowserConfig(contexts=2, timeout_s=60.0), [site.address])
        await browser.setup()
        yield site, browser
        await browser.close()
        await eventually(lambda: not chromes(), "the browser's end")


def chromes() -> list[psutil.Process]:
    """Return the browser processes that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if "--headless" in cmdline(p)]


def mains() -> list[psutil.Process]:
    """Return the main process of each browser, and its forks that have not executed yet."""
    return [p for p in chromes() if "--type=" not in cmdline(p) and "/bin/sh" not in cmdline(p)]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def test_missing_browser_is_a_user_error_with_the_package() -> None:
    with pytest.raises(UserError, match="chromium-headless-shell"):
        await Browser(BrowserConfig(executable="no-such-browser"), []).setup()


async def test_missing_playwright_is_a_user_error_with_the_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "playwright", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[browser\]'"):
        await Browser(BrowserConfig(executable="true"), []).setup()


@needs_chromium
async def test_program_that_is_no_browser_is_a_user_error() -> None:
    browser = Browser(BrowserConfig(executable="false"), [])
    with pytest.raises(UserError, match="false does not start"):
        await browser.setup()
    await browser.close()


@needs_chromium
async def test_pages_are_reused_and_at_most_contexts_are_lent(world) -> None:
    site, browser = world
    lent: set[int] = set()
    now: list[int] = []
    most, two = 0, asyncio.Event()

    async def episode(number: int) -> None:
        nonlocal most
        async with browser.page() as page:
            now.append(number)
            most = max(most, len(now))
            if most == 2:
                two.set()
            await two.wait()
            lent.add(id(page.tab))
            await page.open(site.address)
            now.remove(number)

    await asyncio.gather(*(episode(number) for number in range(8)))
    assert most == 2
    assert len(lent) == 2


@needs_chromium
async def test_page_is_replaced_after_max_uses_episodes(world, monkeypatch) -> None:
    _, browser = world
    monkeypatch.setattr("arealite.ext.web.browser.chromium.MAX_USES", 2)
    lent: list[object] = []
    for _ in range(4):
        async with browser.page() as page:
            lent.append(page)
    assert lent[0] is lent[1] is not lent[2]
    assert lent[0].tab.is_closed()  # type: ignore[attr-defined]


@needs_chromium
async def test_cancelled_episode_frees_its_page(world) -> None:
    site, browser = world
    begun = asyncio.Event()

    async def stuck() -> None:
        async with browser.page() as page:
            await page.open(site.address)
            begun.set()
            await page.evaluate(FOR_EVER)

    for _ in range(3):
        begun.clear()
        task = asyncio.create_task(stuck())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with browser.page(), browser.page() as page:
        await page.open(site.address)
        assert (await page.look()).title == "Here"


@needs_chromium
async def test_episodes_share_no_cookies(world) -> None:
    site, browser = world
    cookie = {"name": "a", "value": "b", "domain": "127.0.0.1", "path": "/", "expires": -1}
    state = {"cookies": [{**cookie, "httpOnly": False, "secure": False, "sameSite": "Lax"}]}
    seen = []
    for given in (state, {}, None):
        async with browser.page(given) as page:
            await page.open(site.address)
            seen.append(await page.evaluate("() => document.cookie"))
            await page.evaluate("() => document.cookie = 'left=1'")
    assert seen == ["a=b", "", ""]


@needs_chromium
@pytest.mark.parametrize("who", ["browser", "driver"])
async def test_dead_browser_fails_its_episodes_and_is_restarted(world, who: str) -> None:
    crash = import_module("arealite.ext.web.browser.page").BrowserCrash
    site, browser = world
    async with browser.page(), browser.page() as page:
        await page.open(site.address)  # both pages become idle pages of the browser that dies

    async def episode() -> None:
        async with browser.page() as page:
            await page.open(site.address)
            begun.set()
            await page.evaluate(FOR_EVER)

    begun = asyncio.Event()
    task = asyncio.create_task(episode())
    await begun.wait()
    old = chromes()
    drivers = [p for p in psutil.Process().children() if "run-driver" in cmdline(p)]
    victims = old if who == "browser" else drivers
    assert victims
    for victim in victims:
        with suppress(ProcessLookupError):  # it has already exited with the others
            os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(crash):
        await task

    async def again() -> str:
        async with browser.page() as page:
            await page.open(site.address)
            return (await page.look()).title

    assert await asyncio.gather(*(again() for _ in range(4))) == ["Here"] * 4
    await eventually(lambda: not any(cmdline(p) for p in old), "the end of the old one")
    await eventually(lambda: len(mains()) == 1, "one browser")


HOSTILE = """<title>Hostile</title>
<a href="{foreign}/link">foreign</a><a href="file://{secret}">file</a>
<a href="/redirect">redirect</a><a href="/to-file">redirect to a file</a>
<a href="http://elsewhere.test/">name</a><a href="data:text/html,<title>Data</title>">data</a>
<a href="chrome://version">chrome</a><a href="view-source:file://{secret}">source</a>
<iframe src="file://{secret}"></iframe><iframe src="{foreign}/frame"></iframe>
<img src="{foreign}/image"><script src="{foreign}/script"></script>
<script>var tried = Promise.allSettled([
  fetch("{foreign}/fetch", {{mode: "no-cors"}}), fetch("file://{secret}"),
  fetch("{foreign}/post", {{method: "POST", mode: "no-cors", body: "x"}}),
  fetch("http://localhost:{port}/name", {{mode: "no-cors"}}),
  fetch("http://[::1]:{port}/six", {{mode: "no-cors"}}),
  fetch("http://2130706433:{port}/number", {{mode: "no-cors"}}),
  new Promise((yes, no) => {{ const s = new WebSocket("ws://127.0.0.1:{port}/socket");
    s.onopen = yes; s.onerror = () => no("socket"); }}),
]).then(all => all.map(each => each.status)); navigator.sendBeacon("{foreign}/beacon", "x");
new Worker(URL.createObjectURL(new Blob(["fetch('{foreign}/worker', {{mode: 'no-cors'}})"])));
</script>"""


@needs_chromium
async def test_only_the_tasks_site_is_reachable(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"{foreign.address}/redirected")

    async def to_file(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"file://{secret}")

    async with serving({"/": "foreign"}) as foreign, serving({}) as site:
        port = foreign.address.rpartition(":")[2]
        hostile = HOSTILE.format(foreign=foreign.address, secret=secret, port=port)
        site.pages |= {"/": hostile, "/redirect": redirect, "/to-file": to_file}
        browser = Browser(BrowserConfig(settle_ms=50, timeout_s=60.0), [site.address])
        await browser.setup()
        try:
            async with browser.page() as page:
                await page.open(site.address)
                assert set(await page.evaluate("() => tried")) == {"rejected"}
                links = [c for c in (await page.look()).choices if c.startswith("click")]
                assert len(links) >= 8
                for link in links:
                    await page.open(site.address)
                    await page.look()
                    await page.perform(parse(link))
                    view = await page.look()
                    assert "the secret" not in view.text
                    assert view.title not in ("Data", "Version")
                for url in (f"file://{secret}", f"{foreign.address}/goto", "chrome://version"):
                    with pytest.raises(BadAction, match="cannot go there"):
                        await page.perform(parse(f"goto [{url}]"))
        finally:
            await browser.close()
        assert foreign.asked == []
        assert {"/", "/redirect", "/to-file"} <= set(site.asked)
