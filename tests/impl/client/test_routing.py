"""Selection of the server for a request."""

from __future__ import annotations

import asyncio

from arealite.base.errors import DeadlineError
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.impl.client import server_choice
from arealite.impl.client.server_choice import LLMServerState, Router
from arealite.system.health.waits import Wait


def router(*versions: int, alive: bool = True) -> Router:
    made = Router()
    for index, version in enumerate(versions):
        server = LLMServerState(
            id=f"s{index}",
            address=f"http://127.0.0.1:{9000 + index}",
            version=version,
            alive=alive,
            protocol=SGLangProtocol(),
        )
        made.servers[server.id] = server
    return made


def test_requests_of_a_group_share_a_server_and_groups_are_balanced() -> None:
    made = router(1, 1)
    homes = []
    for group in ("a", "b", "c", "d"):
        server = made.pick(group, 0)
        assert server is not None
        server.in_flight += 1
        homes.append(server.id)
        assert made.pick(group, 0) is server
    assert sorted(homes) == ["s0", "s0", "s1", "s1"]


def test_tie_goes_to_the_server_with_fewer_served_requests() -> None:
    made = router(0, 0)
    made.servers["s0"].served = 5
    assert made.pick("g", 0) is made.servers["s1"]


def test_outdated_and_dead_servers_get_no_request() -> None:
    made = router(1, 3)
    assert made.pick("g", 2) is made.servers["s1"]
    assert made.pick("g", 4) is None
    made.servers["s1"].alive = False
    assert made.pick("g", 0) is made.servers["s0"]
    assert "s1 (http://127.0.0.1:9001): unreachable" in made.no_server_reason(2)


def test_failed_server_is_avoided_if_another_exists() -> None:
    made = router(0, 0)
    first = made.pick("g", 0)
    assert made.pick("g", 0, avoid=first) is not first
    alone = router(0)
    only = alone.pick("g", 0)
    assert alone.pick("g", 0, avoid=only) is only


def test_number_of_remembered_groups_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(server_choice, "STICKY_GROUPS", 3)
    made = router(0)
    for group in range(10):
        made.pick(str(group), 0)
    assert list(made._groups) == ["7", "8", "9"]


async def test_lost_server_interrupts_its_waits() -> None:
    server = LLMServerState(
        id="s", address="http://127.0.0.1:9", alive=True, protocol=SGLangProtocol()
    )

    async def ask() -> None:
        with Wait(event="an answer", owner="llm client", seconds=60) as wait:
            server.waits[wait] = None
            await asyncio.Event().wait()

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    server.remove_from_traffic()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, DeadlineError) and not server.alive
