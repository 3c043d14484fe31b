"""Attempts of a web page of another origin, in Chromium, on the language-model server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.attacks.conftest import Live
from tests.attacks.kinds import KIND
from tests.e2e.conftest import SLOW_S
from tests.ext.web.browser.sites import Site, needs_chromium, serving
from tests.waiting import eventually

pytestmark = [
    needs_chromium,
    pytest.mark.attacks,
    pytest.mark.timeout(2 * SLOW_S),
    pytest.mark.asyncio(loop_scope="module"),
]

EVIL = "evil.example"
BODY = json.dumps({"mode": "abort", "new_version": "owned", "abort_all": True})
TARGETS = [KIND.pauses[0][0], "/update_weight_version", KIND.abort_all[0], KIND.version]
REBOUND = 403 if KIND.checks_host else 401
"""Status of the answer to a page whose host name resolves to the server."""
SCRIPTS = {
    "fetch without CORS": "fetch(url, {method: 'POST', mode: 'no-cors', body, headers:"
    " {'Content-Type': 'text/plain'}})",
    "fetch with CORS": "fetch(url, {method: 'POST', body, headers:"
    " {'Content-Type': 'application/json'}})",
    "fetch with a token": "fetch(url, {method: 'POST', body, headers:"
    " {Authorization: 'Bearer x'}})",
    "fetch with credentials": "fetch(url, {method: 'POST', body, credentials: 'include'})",
    "fetch that reads": "fetch(url).then(answer => answer.text())",
    "fetch that reads without CORS": "fetch(url, {mode: 'no-cors'})",
    "fetch without a referrer": "fetch(url, {method: 'POST', mode: 'no-cors', body,"
    " referrerPolicy: 'no-referrer'})",
    "fetch that outlives its page": "fetch(url, {method: 'POST', mode: 'no-cors', body,"
    " keepalive: true})",
    "XMLHttpRequest": "(() => { const x = new XMLHttpRequest(); x.open('POST', url);"
    " x.send(body) })()",
    "beacon": "navigator.sendBeacon(url, new Blob([body], {type: 'text/plain'}))",
    "form": "form(url, 'application/x-www-form-urlencoded')",
    "form of text": "form(url, 'text/plain')",
    "form with a file": "form(url, 'multipart/form-data')",
    "form of a sandboxed frame": "framed(`<form id=f method=post action='${url}'></form>"
    "<script>f.submit()</script>`)",
    "image": "element('img', {src: url})",
    "script": "element('script', {src: url})",
    "style": "element('link', {rel: 'stylesheet', href: url})",
    "frame": "element('iframe', {src: url})",
    "video": "element('video', {src: url, preload: 'auto'})",
    "prefetch": "element('link', {rel: 'prefetch', href: url})",
    "web socket": "new WebSocket(url.replace('http', 'ws'))",
    "event source": "new EventSource(url)",
    "window": "window.open(url)",
}
HELPERS = """
const element = (name, facts) => document.body.append(Object.assign(
    document.createElement(name), facts));
const form = (url, enctype) => {
    const made = Object.assign(document.createElement('form'),
        {action: url, method: 'POST', enctype, target: '_blank'});
    made.append(Object.assign(document.createElement('input'), {name: body, value: ''}));
    document.body.append(made); made.submit();
};
const framed = html => element('iframe', {sandbox: 'allow-scripts allow-forms', srcdoc: html});
"""
PAGE = "<!doctype html><title>Cute cats</title><body>"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def evil() -> AsyncGenerator[Site, None]:
    """Serve a site of an attacker on another port, which is another origin."""
    async with serving({"/": PAGE}) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncGenerator[Any, None]:
    """Return a browser that resolves the attacker's host name to this machine."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"),
            chromium_sandbox=False,
            args=["--no-proxy-server", f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"],
        )
        yield browser
        await browser.close()


async def outcomes(context: Any, address: str, act: Any) -> list[int]:
    """Return the statuses of a page's requests to a server; 0 for a request that was not sent."""
    found, heard = list[int](), asyncio.Event()

    def note(request: Any, status: int) -> None:
        if request.url.startswith((address, address.replace("http", "ws"))):
            found.append(status)
            heard.set()

    async def answered(response: Any) -> None:
        note(response.request, response.status)

    context.on("response", answered)
    context.on("requestfailed", lambda request: note(request, 0))
    await act()
    async with asyncio.timeout(SLOW_S):
        await heard.wait()
    return found


async def run_script(page: Any, name: str, url: str) -> str:
    """Return the text that a page's script reads, or its error."""
    script = f"""async ([url, body]) => {{
        globalThis.body = body; {HELPERS}
        try {{ return String(await ({SCRIPTS[name]})) }}
        catch (error) {{ return 'failed ' + error }}
    }}"""
    return await page.evaluate(script, [url, BODY])


async def test_each_attempt_reaches_an_unprotected_server(evil: Site, chromium: Any) -> None:
    """Control experiment: the requests of the tests below are sent."""
    paths = {name: f"/{place}" for place, name in enumerate(SCRIPTS)}
    async with serving(dict.fromkeys(paths.values(), PAGE)) as victim:
        for name, path in paths.items():
            page = await chromium.new_page()
            await page.goto(evil.address)
            await run_script(page, name, victim.address + path)
            await eventually(lambda path=path: path in victim.asked, name)
            await page.close()


@pytest.mark.parametrize("path", TARGETS)
@pytest.mark.parametrize("name", SCRIPTS)
async def test_page_of_another_origin_changes_and_reads_nothing(
    live: Live, evil: Site, chromium: Any, name: str, path: str
) -> None:
    server, context = live.server, await chromium.new_context()
    page = await context.new_page()
    await page.goto(evil.address)
    said = ""

    async def act() -> None:
        nonlocal said
        said = await run_script(page, name, server + path)

    if name == "web socket":
        await act()  # Playwright reports web sockets in separate events
    else:
        statuses = await outcomes(context, server, act)
        assert {*statuses} <= {0, 401, 403}, statuses
    assert "weight_version" not in said
    await context.close()
    assert live.is_untouched()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", TARGETS)
async def test_page_of_a_rebound_name_changes_and_reads_nothing(
    live: Live, chromium: Any, path: str, method: str
) -> None:
    """The page and the server then have one origin for the browser."""
    address = f"http://{EVIL}:{urlsplit(live.server).port}"
    context = await chromium.new_context()
    page = await context.new_page()
    answer = await page.goto(address + KIND.version)
    assert answer.status == REBOUND
    body = BODY if method == "POST" else None
    status = await page.evaluate(
        "async ([url, method, body]) => (await fetch(url, {method, body})).status",
        [address + path, method, body],
    )
    assert status in (REBOUND, 403)
    await context.close()
    assert live.is_untouched()


async def test_page_cannot_send_messages_to_the_datapipe(
    live: Live, evil: Site, chromium: Any
) -> None:
    context = await chromium.new_context()
    page = await context.new_page()
    await page.goto(evil.address)
    url = live.datapipe.replace("tcp", "http")
    said = await page.evaluate(
        "url => fetch(url, {method: 'POST', mode: 'no-cors', body: 'x'.repeat(9999)})"
        ".then(String, String)",
        url,
    )
    assert "failed" in said.lower() or "error" in said.lower()
    await context.close()
    live.wait_for_steps()
