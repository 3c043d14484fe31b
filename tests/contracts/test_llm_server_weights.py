"""The contract of weight updates of all servers, as observed with SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from tests.contracts.backends import LONG, Backend, Trainer, layouts, num_bytes, trainer_process

OUTSIDE = "must run between begin_weight_update() and end_weight_update()"
with_sessions = pytest.mark.parametrize(
    "server", ["fake", pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)
"""The embedded server has no update sessions, because it checks weights before it writes them."""


def needs(server: Backend, path: str) -> None:
    """Skip a test if the server has no such route; the probe detects that, too."""
    if not server.has(path):
        pytest.skip(f"this version has no {path}")


async def test_openapi_description_has_the_fields_a_probe_reads(server: Backend) -> None:
    modes = server.fields("PauseGenerationReqInput")["mode"]["enum"]
    assert {"abort", "retract", "in_place"} <= set(modes)
    assert "load_format" in server.fields("UpdateWeightsFromDistributedReqInput")
    for path in ("init_weights_update_group", "update_weight_version"):
        assert server.has(f"/{path}")
    info = (await server.get("/server_info"))[1]
    assert (info["tp_size"], info["dp_size"]) == (1, 1)
    assert info["dtype"] in ("float32", "auto")


@with_sessions
async def test_update_outside_a_session_is_refused_at_once(server: Backend) -> None:
    needs(server, "/begin_weight_update")
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
    status, answer = await server.post("/update_weights_from_distributed", **body)
    assert status == 400 and not answer["success"]
    assert answer["message"].endswith(OUTSIDE)
    assert await server.version() == "default"


@with_sessions
async def test_session_cannot_be_opened_or_closed_twice(server: Backend) -> None:
    needs(server, "/begin_weight_update")
    status, answer = await server.post("/end_weight_update")
    assert status == 400 and "no weight-update session is open" in answer["message"]
    await server.begin()
    status, answer = await server.post("/begin_weight_update")
    assert status == 400 and "a weight-update session is already open" in answer["message"]
    server.check(await server.generate(2))
    await server.end()
    await server.begin()
    await server.end()


@with_sessions
@pytest.mark.parametrize("route", ["/begin_weight_update", "/end_weight_update"])
async def test_session_waits_for_running_requests_unless_paused(
    server: Backend, route: str
) -> None:
    needs(server, route)
    task, events = await server.streaming()
    await server.post("/pause_generation", mode="retract")
    await server.post(route)
    assert not task.done()
    await server.post("/continue_generation")
    server.release()
    await server.post(route)  # publishers send this even if it is refused
    await task
    assert len(events[-1]["output_ids"]) == LONG


@pytest.mark.sglang_short
@pytest.mark.parametrize("flat", [False, True])
async def test_weights_are_received_through_a_process_group(
    server: Backend, trainer: Trainer, flat: bool
) -> None:
    status, _ = await server.load(1)
    assert status == 200
    wanted = await server.checksum()
    greedy = await server.generate(8, sampling={"temperature": 0})
    await server.load(0)
    assert (await trainer.join(server))[0] == 200
    await server.begin()
    buckets = layouts(server.folders[1], num_bytes(server.folders[1]) // 2)
    assert len(buckets) >= 2
    for layout in buckets:
        last = layout is buckets[-1]
        status, answer = await trainer.update(
            server,
            server.folders[1],
            layout,
            flat=flat,
            flush_cache=last,
            weight_version="12" if last else None,
        )
        assert status == 200 and answer["success"], answer
        assert await server.version() == ("12" if last else "default")
    assert answer["message"].endswith("Weight version updated to 12.")
    await server.end()
    assert (await trainer.leave(server))[0] == 200
    after = await server.generate(8, sampling={"temperature": 0})
    assert server.versions(after) == ["12"]
    assert after["output_ids"] == greedy["output_ids"]
    if wanted and not server.is_scripted:
        assert await server.checksum() == wanted


async def test_group_update_splits_the_versions_of_running_requests(
    server: Backend, trainer: Trainer
) -> None:
    assert (await trainer.join(server))[0] == 200
    task, events = await server.streaming()
    await server.post("/pause_generation", mode="retract")
    await server.begin()
    (layout,) = layouts(server.folders[1])
    status, _ = await trainer.update(server, server.folders[1], layout, weight_version="3")
    assert status == 200
    await server.end()
    await server.post("/continue_generation")
    server.release()
    await task
    await trainer.leave(server)
    assert len(events[-1]["output_ids"]) == LONG
    assert server.versions(events[-1]) == (["default", "3"] if server.spans else ["3"])


async def test_process_groups_can_be_created_and_destroyed(
    server: Backend, trainer: Trainer
) -> None:
    (layout,) = layouts(server.folders[0])
    body = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes}
    status, answer = await trainer.join(server)
    assert status == 200 and answer["success"]
    name = trainer.group
    status, answer = await trainer.leave(server)
    assert status == 200 and answer["success"]
    status, answer = await server.post("/destroy_weights_update_group", group_name=name)
    assert status == 400 and "does not exist" in answer["message"]
    if not server.is_old_sglang:  # an unknown group crashes this version
        await server.begin()
        path = "/update_weights_from_distributed"
        status, answer = await server.post(path, group_name=name, **body)
        assert status == 400
        assert answer["message"].startswith(f"Failed to receive weights: Group {name} not in")
        await server.end()
    assert (await trainer.join(server, name))[0] == 200
    assert (await trainer.leave(server))[0] == 200


async def test_update_is_refused_if_the_trainer_dies_during_it(server: Backend) -> None:
    if server.is_old_sglang:
        pytest.skip("this version dies of it")
    if server.is_scripted:
        pytest.skip("the fake receives nothing")
    (layout,) = layouts(server.folders[1])
    body = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes}
    with trainer_process() as doomed:
        assert (await doomed.join(server))[0] == 200
        await server.begin()
        path, name = "/update_weights_from_distributed", doomed.group
        update = asyncio.ensure_future(server.post(path, group_name=name, **body))
        await asyncio.sleep(0.2)  # no event shows that the server waits
        assert not update.done()
        doomed.process.kill()
        assert doomed.process.wait(60) != 0
        async with asyncio.timeout(60):
            status, answer = await update
    assert status == 400 and "Failed to receive weights" in answer["message"]
    assert await server.version() == "default"
    await server.end()
    assert (await server.post("/destroy_weights_update_group", group_name=name))[0] == 200
    server.check(await server.generate(2))


async def test_checksum_changes_with_the_weights(server: Backend) -> None:
    if not (first := await server.checksum()):
        pytest.skip("this version makes no checksums")
    await server.load(1)
    other = await server.checksum()
    await server.load(0)
    again = await server.checksum()
    await server.load(0, weight_version="5")
    assert len({first, other}) == 2
    assert again == await server.checksum()
    if not server.is_scripted:  # the initial weights are not in a folder
        assert first == again
    if server.has("/weights_checker"):
        status, answer = await server.post("/weights_checker", action="nonsense")
        assert status == 400 and not answer["success"]


async def test_version_can_be_changed_without_an_update(server: Backend) -> None:
    task, events = await server.streaming()
    status, answer = await server.post(
        "/update_weight_version", new_version="-1", abort_all_requests=False
    )
    assert (status, answer["new_version"]) == (200, "-1")
    server.release()
    await task
    assert await server.version() == "-1"
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    if server.spans:
        assert server.versions(events[-1]) == ["default", "-1"]
    assert server.versions(await server.generate(2)) == ["-1"]


async def test_changing_the_version_aborts_running_requests(server: Backend) -> None:
    task, events, crowd = await server.crowded()
    assert (await server.post("/update_weight_version", new_version="-1"))[0] == 200
    await task
    for answer in (events[-1], *await crowd):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_update_that_could_not_flush_reports_it(server: Backend) -> None:
    if server.is_old_sglang:
        pytest.skip("this version dies of it")
    rid = uuid.uuid4().hex
    task, events = await server.streaming(rid)
    await server.post("/pause_generation", mode="in_place")
    status, answer = await server.post(
        "/update_weights_from_disk", model_path=server.folders[1], weight_version="6"
    )
    assert status == 400 and not answer["success"]
    assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
    assert await server.version() == "default"
    assert (await server.post("/flush_cache"))[0] == 400
    await server.post("/continue_generation")
    server.release()
    await task
    assert server.versions(events[-1]) == ["default", "6"]
    await server.flush()
    assert await server.version() == "default"
    assert server.versions(await server.generate(2)) == ["6"]
    assert (await server.load(1, weight_version="6"))[0] == 200
    assert await server.version() == "6"
