"""A run without a server: the trainer's process generates from the parameters that it trains.

If the trainer is killed, trainer and generator restart together.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.ext.served_policy.proof_file import ProofFile, ServerProof
from arealite.impl.engine import checkpoint
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone
from tests.e2e.test_critic import trainer_of
from tests.e2e.test_replay import REWARD
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(900)]

STEPS = 8
OPTIONS = (
    "trial_name=shared",
    f"imports=[variety,{gated.FILE}]",
    "trainer.ppo.collector.env.type=gated",
    "trainer.ppo.collector.env.gated.reward.type=variety",
    "trainer.ppo.publisher.type=shared",
    "trainer.ppo.max_staleness=2",
    "trainer.ppo.collector.sampling.max_new_tokens=24",
    "trainer.ppo.checkpoint.every_steps=2",
    "trainer.ppo.lr=1e-2",
    f"trainer.ppo.total_steps={STEPS}",
)


def test_shared_parameters_generate_and_learn(site: Site, tmp_path: Path) -> None:
    (tmp_path / "variety.py").write_text(REWARD)
    names = f"cluster.name_root={tmp_path / 'names'}"
    paths = RunPaths(tmp_path / "e2e" / "shared")
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    gate, groups = tmp_path / "gate", 4  # of a batch
    gated.write(gate, 2 * groups)
    options = [*OPTIONS, names, f"trainer.ppo.collector.env.gated.gate={gate}"]
    with spawned(site.command(tmp_path, *options), environment) as run:
        saved = lambda: checkpoint.list_good(paths.checkpoints) or run.poll() is not None  # noqa: E731
        until(saved, what="a checkpoint", seconds=SLOW_S)
        victim = trainer_of(run.pid)
        assert victim is not None
        gated.write(gate, 5 * groups)  # generation continues, and the run cannot end yet
        victim.kill()
        victim.wait(60)
        gate.unlink()
        shown = run.communicate(timeout=SLOW_S)[0]
    assert run.returncode == 0, shown
    assert "trainer-0 died (killed by SIGKILL); started again" in shown
    assert "waiting up to" not in shown, "it waited for a server"
    report = audit(paths.ledger)
    assert report.ok, report.table()
    assert report.steps == STEPS
    proofs = [line for line in ProofFile(paths.root).lines() if isinstance(line, ServerProof)]
    assert any(proof.is_proven for proof in proofs)
    assert not any(proof.fault for proof in proofs)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    trained = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert any("publish/num_bytes" in line for line in trained)
    for line in trained:
        assert line["staleness/max"] <= 2
        assert line.get("publish/num_bytes", 0) == 0
        assert line["update/grad_norm"] > 0
    assert trained[0]["mismatch/current_tokens"] > 0
    assert trained[0]["mismatch/logprob_abs_diff_max_current"] < 1e-4
    changes = [line["mismatch/logprob_abs_diff_max"] for line in trained]
    assert max(changes) > 1e-2, "the policy did not change"
    all_gone(tmp_path)
