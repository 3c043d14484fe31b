"""The public SDK against a service, as its user runs both."""

from __future__ import annotations

import math

import pytest

from tests.tinker.conftest import RunningService

pytestmark = pytest.mark.tinker


def test_every_call_of_the_sdk(service: RunningService) -> None:
    seen = service.client("every_call")

    assert seen["models"] == ["org/tiny"]
    assert seen["rank"] == 4
    assert seen["losses"][0] == pytest.approx(seen["forward"], rel=1e-6)
    assert seen["losses"][-1] < seen["losses"][0] - 1
    assert seen["forward"] == pytest.approx(-seen["sum of logprobs"], rel=1e-6)
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        assert math.isfinite(seen[loss])
    assert seen["shape of two targets"] == [2, 2]
    assert seen["own loss"] == ["loss:sum", "squares:sum", "surrogate_loss:sum"]
    assert seen["paths"] == ["0/weights/state", "0/sampler_weights/weights"]
    assert seen["checkpoints"] == ["sampler_weights/weights", "weights/state"]
    assert seen["samples are equal"]
    assert seen["served minus trained"] < 2e-5
    assert seen["named tokens minus the prompt's"] < 1e-6
    assert seen["first prompt logprob"] is None
    assert seen["top of the prompt"] == [None, 3, 3, 3, 3]
    assert seen["top of a sample"]
    assert seen["base is untrained"]
    assert seen["continued exactly"]
    assert seen["fresh optimizer differs"]
    unknown_loss, other_model, no_checkpoint, no_eos = seen["refusals"]
    assert "Known: cross_entropy, importance_sampling, ppo, cispo, dro, gspo" in unknown_loss
    assert "this service has 'org/tiny'" in other_model
    assert "there is no checkpoint" in no_checkpoint
    assert "this service always ends an answer at EOS" in no_eos
