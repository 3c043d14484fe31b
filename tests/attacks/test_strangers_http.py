"""Attempts on the language-model server without the token, or from a web page."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from tests.attacks.conftest import Live
from tests.attacks.kinds import KIND
from tests.attacks.peers import GUESS
from tests.e2e.conftest import SLOW_S

pytestmark = [pytest.mark.attacks, pytest.mark.part, pytest.mark.timeout(2 * SLOW_S)]

READS = [*KIND.gets, "/nowhere"]
PAUSE, _, _ = KIND.pauses[0][0].partition("?")
STRANGERS = {
    "no token": ({}, False, 401),
    "another trial's token": ({"Authorization": f"Bearer {GUESS.token}"}, False, 401),
    "a page's request": ({"Origin": "http://evil.example"}, True, 403),
    "a rebound name": (
        {"Host": "evil.example"},
        KIND.checks_host,
        403 if KIND.checks_host else 401,
    ),
}
"""By name: headers, whether the trial's token is sent, and the status of the answer."""


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("path", [*KIND.posts, *READS])
async def test_server_refuses_requests_without_the_token_or_from_web_pages(
    live: Live, path: str, who: str
) -> None:
    more, knows_token, status = STRANGERS[who]
    sent = more | (live.ours if knows_token else {})
    method = "POST" if path in KIND.posts else "GET"
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, live.server + path, json=KIND.posts.get(path), headers=sent
        ) as answer,
    ):
        assert answer.status == status
        assert len(await answer.read()) < 300
    assert live.is_alive()


@pytest.mark.parametrize(
    "sent",
    [
        "Bearer", "Bearer ", "Bearer null", "Basic YWRtaW46YWRtaW4=", "bearer {token}",
        "Bearer {token}x", "Bearer {token[0]}", "Bearer \xff\xfe", "Token {token}",
        "Bearer Bearer {token}",
    ],
)  # fmt: skip
async def test_other_authorization_headers_are_refused(live: Live, sent: str) -> None:
    text = sent.format(token=live.secret.token)
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": text}
        async with session.get(live.server + KIND.version, headers=headers) as answer:
            assert answer.status == 401


@pytest.mark.parametrize("sent", ["cookies", "query", "both twice"])
async def test_token_outside_the_authorization_header_is_refused(live: Live, sent: str) -> None:
    token = live.secret.token
    cookies = {} if sent == "query" else {"Authorization": f"Bearer {token}", "token": token}
    query = {} if sent == "cookies" else {"token": token, "api_key": token}
    async with (
        aiohttp.ClientSession(cookies=cookies) as session,
        session.get(live.server + KIND.version, params=query) as answer,
    ):
        assert answer.status == 401


@pytest.mark.parametrize(
    "path", [f"/{PAUSE}", f"/health/..{PAUSE}", f"/health/%2e%2e{KIND.flush}",
             f"{PAUSE}/", PAUSE.upper(), f"/health;{PAUSE}"]
)  # fmt: skip
async def test_no_spelling_of_a_path_bypasses_the_token(live: Live, path: str) -> None:
    async with aiohttp.ClientSession() as session:
        url = URL(live.server + path, encoded=True)
        async with session.post(url, json={}) as answer:
            assert answer.status in (401, 404)
    assert live.is_untouched()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
async def test_no_http_method_bypasses_the_token(live: Live, method: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, live.server + PAUSE) as answer,
    ):
        assert answer.status in (400, 401, 404, 405)
    assert live.is_untouched()


async def test_health_needs_no_token_and_has_an_empty_body(live: Live) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(live.server + "/health") as answer,
    ):
        assert answer.status == 200 and not await answer.read()
