"""Each planted fault is found within one version, and no ordinary publish raises an alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.base.errors import InvariantError
from arealite.ext.served_policy.proof_file import sent_notes
from tests.ext.served_policy.plants import (
    FAULTS,
    Fault,
    confirms_without_loading,
)
from tests.ext.served_policy.runs import Run
from tests.models import tiny_mixture, tiny_model

PUBLISHES = 25


@pytest.fixture(autouse=True)
def _group(group: None) -> None:
    pass


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_planted_fault_stops_the_run_at_its_first_version(
    tmp_path: Path, fault: Fault
) -> None:
    async with Run(fault.write(tmp_path), served_dtype=fault.served_dtype).running() as run:
        await run.publish_and_plant(fault)
        with pytest.raises(InvariantError, match=fault.reason):
            await run.publish(fault.first)
        *earlier, first, second = run.proofs()
        assert len(earlier) == fault.first
        assert all(proof.is_proven for proof in earlier), earlier
        assert first.fault == second.fault


async def test_one_of_two_servers_is_quarantined_and_proven_at_the_next_version(
    tmp_path: Path,
) -> None:
    folder = tiny_model(tmp_path / "model", init_std=0.1)
    async with Run(folder, num_servers=2).running() as run:
        await run.publish(0)
        unplant = run.plant(confirms_without_loading)
        run.train()
        report = await run.publish(1)
        wrong_id = run.servers[0].entry_id
        assert report.quarantined == [wrong_id]
        unplant()
        run.train()
        await run.publish(2)
        await run.until_proven(2, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
async def test_no_ordinary_publish_raises_an_alarm(tmp_path: Path, family: str, dtype: str) -> None:
    write = tiny_mixture if family == "qwen3_moe" else tiny_model
    folder = write(tmp_path / "model", family=family, init_std=0.1)
    async with Run(folder, dtype=dtype).running() as run:
        for version in range(PUBLISHES):
            run.train(10.0 ** -(1 + version % 6), seed=version)
            await run.publish(version)
        proofs = run.proofs()
        assert len(proofs) == PUBLISHES
        assert all(proof.is_proven for proof in proofs), proofs
        (note,) = sent_notes(run.records)
        count = f"{PUBLISHES} versions, {PUBLISHES} different fingerprints"
        assert note.startswith(f"weights sent: {count}; version {PUBLISHES - 1}: ")
