"""`arealite check --served` tells which weights a server has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from arealite.base import config as base_config
from arealite.cli.main import main
from tests.ext.served_policy.runs import Run
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def _group(group: None) -> None:
    pass


async def check(*words: str) -> int:
    return await asyncio.to_thread(main, ["check", *words])


async def test_version_of_a_run_and_folder_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_model(tmp_path / "other", seed=1, init_std=0.1)
    async with Run(tiny_model(tmp_path / "model", init_std=0.1)).running() as run:
        address = run.servers[0].address.removeprefix("http://")
        await run.publish(0)
        assert await check("--served", address, "--against", str(run.folder)) == 0
        assert await check("--served", address, "--against", str(other)) == 1
        for version in (1, 2):
            run.train(seed=version)
            await run.publish(version)
        root = run.file.path.parent
        base_config.save(run.config, root / "config.yaml")
        capsys.readouterr()
        assert await check("--served", address, "--against", f"{root}@2") == 0
        assert f"{address} serves version 2 of {root}: " in capsys.readouterr().out
        assert await check("--served", address, "--against", f"{root}@1") == 1
        assert await check("--served", address, "--against", str(root)) == 0
