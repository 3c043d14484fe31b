"""Losses and a call, which the ranks of test_ranks.py import."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from arealite.api.engine import LossInput
from arealite.ext.session import child_rank
from arealite.ext.session.engine_rank import EngineRank


def reinforce(batch: LossInput) -> torch.Tensor:
    """Return Σ weight · −A · logprob."""
    terms_N = -batch.fields["advantages"] * batch.outputs["logprobs"]
    return (terms_N * batch.fields["loss_weight"]).sum()


def fails(batch: LossInput) -> torch.Tensor:
    """Fail on every rank."""
    raise ZeroDivisionError("no loss")


def fails_on_rank_1(batch: LossInput) -> torch.Tensor:
    """Fail on rank 1, which waits for no answer."""
    if dist.get_rank() == 1:
        child_rank.CONTINUE_S = 0.0
        raise ZeroDivisionError("no loss")
    return reinforce(batch)


def fails_on_rank_0(batch: LossInput) -> torch.Tensor:
    """Fail on rank 0."""
    if dist.get_rank() == 0:
        raise ZeroDivisionError("no loss")
    return reinforce(batch)


def fails_on_one_rank(engine_rank: EngineRank, rank: int) -> None:
    """Fail on a rank, in a call without collectives."""
    if engine_rank.world.rank == rank:
        raise ZeroDivisionError("after the last collective")


def kills_rank_1(batch: LossInput) -> torch.Tensor:
    """Kill rank 1."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return reinforce(batch)
