"""The fake simulates older versions of SGLang and servers that report wrong values."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.contracts.backends import Backend, retractions
from tests.fakes.sglang import FakeSGLang

NAMES = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}


async def use(fake: FakeSGLang, body: Any) -> None:
    async with fake, aiohttp.ClientSession(fake.url) as session:
        backend = Backend(session, [], is_scripted=True)
        await backend.probe()
        await body(backend)


async def test_fake_without_spans_and_sessions_is_an_older_version() -> None:
    async def old(server: Backend) -> None:
        assert not server.spans
        assert not server.has("/begin_weight_update") and not server.has("/weights_checker")
        assert "load_format" not in server.fields("UpdateWeightsFromDistributedReqInput")
        for path in ("/begin_weight_update", "/end_weight_update", "/weights_checker"):
            assert (await server.post(path))[0] == 404
        await server.post("/init_weights_update_group", group_name="g")
        status, _ = await server.post("/update_weights_from_distributed", **NAMES)
        assert status == 200
        answer = await server.generate(2)
        server.check(answer)
        assert "weight_versions" not in answer["meta_info"]
        assert "num_retractions" not in answer["meta_info"] and retractions(answer) == 0

    await use(FakeSGLang(sessions=False, spans=False, checksum=None, buckets=False), old)


async def test_fake_can_report_wrong_checksums_and_scripted_failures() -> None:
    fake = FakeSGLang()

    async def check(server: Backend) -> None:
        true = await server.checksum()
        fake.checksum = "1ie"
        assert await server.checksum() == "1ie" != true
        for path in ("/begin_weight_update", "/weights_checker", "/init_weights_update_group"):
            fake.fail_next("500", path=path)
            assert (await server.post(path))[0] == 500
        await server.begin()
        await fake.restart()
        await server.begin()

    await use(fake, check)
