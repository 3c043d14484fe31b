"""A trainer with a canary that publishes to a real SGLang or vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.errors import InvariantError
from arealite.ext.served_policy.canary import Canary
from arealite.ext.served_policy.proof_file import ProofFile, ServerProof
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.trainer.rank_group import World
from tests.impl.engine.helpers import make_engine


class RealRun:
    """The trainer's side; the caller's config lists the server."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.engine = make_engine(Path(config.model.path))
        self.publisher = DiskPublisher(config, self.engine)
        self.canary = Canary(config, self.engine, World())
        self.publisher.proof = self.canary
        self.file = ProofFile(run_paths(config).root)

    def publish(self, version: int, *, sends: bool = True) -> None:
        """Publish the trainer's weights; without `sends`, send those of the version before."""
        before = {name: tensor.clone() for name, tensor in self.engine.stream_weights()}
        self.train(version)
        self.canary.expect(version)
        weights = self.engine.stream_weights() if sends else iter(before.items())
        self.publisher.stage(version, weights)
        self.publisher.push(version)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Change all parameters a little."""
        torch.manual_seed(seed)
        for parameter in self.engine.module.parameters():
            parameter += 0.005 * torch.randn_like(parameter)

    def proofs(self) -> list[ServerProof]:
        """Return the results in the run's file."""
        return [line for line in self.file.lines() if isinstance(line, ServerProof)]


@contextmanager
def real_run(config: ExperimentConfig) -> Iterator[RealRun]:
    """Provide a run, and close its publisher."""
    run = RealRun(config)
    try:
        yield run
    finally:
        run.publisher.close()


def check_proofs_and_old_weights(run: RealRun) -> None:
    """Check that four versions are proven, and that a fifth one that is not sent is found."""
    for version in range(4):
        run.publish(version)
    proofs = run.proofs()
    assert [proof.is_proven for proof in proofs] == [True] * 4, proofs
    assert max(proof.largest for proof in proofs) < 1e-3
    with pytest.raises(InvariantError, match="old weights: the scores equal version 3's"):
        run.publish(4, sends=False)
