"""Heads that scale or cap their logits, or have a bias, train as in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from arealite.algo.logprobs import LogitChange
from arealite.api.engine import LossInput
from arealite.base.errors import UserError
from arealite.ext.models.output_head import logit_change
from arealite.impl.engine.loading import empty_model
from tests.impl.engine.helpers import assert_close, gradients, make_engine, make_rows
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("group")
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "tie_word_embeddings": False}
HEADS: dict[str, tuple[dict[str, Any], LogitChange]] = {
    "gemma2": (
        {"final_logit_softcapping": 0.5, "head_dim": 8, "tie_word_embeddings": True},
        LogitChange(softcap=0.5),
    ),
    "cohere2": ({"logit_scale": 0.25}, LogitChange(0.25)),
    "granite": ({"logits_scaling": 8.0}, LogitChange(0.125)),
    "minicpm3": ({**LATENT, "dim_model_base": 8}, LogitChange(0.25)),
    "phi": ({"tie_word_embeddings": False}, LogitChange()),
    "gptj": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "tie_word_embeddings": False},
        LogitChange(),
    ),
}


def draw_biases(path: Path) -> None:
    """Draw the biases of a folder, which are 0 in a new model."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(path)


@pytest.mark.parametrize("family", HEADS)
def test_outputs_and_gradients_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    options, change = HEADS[family]
    path = tiny_model(tmp_path, family=family, **options)
    draw_biases(path)
    engine, rows = make_engine(path), make_rows(4)
    assert engine._model.change == change  # type: ignore[union-attr]
    plain = AutoModelForCausalLM.from_pretrained(path)

    def loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = batch.outputs["logprobs"].sum() + 0.1 * batch.outputs["entropy"].sum()
        return total, {"loss": total.detach()}

    total = torch.tensor(0.0)
    for row in rows:
        logits = plain(input_ids=torch.from_numpy(row.tokens).long()[None]).logits[0, :-1]
        logp = torch.log_softmax(logits / row.temperature, -1)[row.loss_mask[1:]]
        targets = torch.from_numpy(row.tokens).long()[row.loss_mask]
        total = total + logp.gather(1, targets[:, None]).sum() - 0.1 * (logp.exp() * logp).sum()
    total.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found, stats = gradients(engine, rows, loss)
    assert stats["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert_close(found, expected, tolerance=2e-4)  # type: ignore[arg-type]


class Shifted(Qwen2ForCausalLM):
    """A model whose head gets a shifted hidden state."""

    def forward(self, **inputs: Any) -> Any:
        with_shift = self.model.forward
        self.model.forward = lambda **given: moved(with_shift(**given))  # type: ignore[method-assign]
        try:
            return super().forward(**inputs)
        finally:
            self.model.forward = with_shift  # type: ignore[method-assign]


def moved(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state + 1
    return output


class Squared(Qwen2ForCausalLM):
    """A model with a change of logits that is neither a scale nor a softcap."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits.square()
        return output


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Shifted, "Shifted changes the decoder's output before its head"),
        (Squared, "Squared changes its logits in a way that is not supported"),
    ],
)
def test_unknown_change_of_logits_is_refused(kind: type, says: str, model: Path) -> None:
    with pytest.raises(UserError, match=says):
        logit_change(kind(empty_model(model).config))


def test_head_that_is_no_linear_layer_is_refused(model: Path) -> None:
    module = empty_model(model)
    module.set_output_embeddings(nn.Sequential())
    with pytest.raises(UserError, match=r"no linear output head \(Sequential\)"):
        logit_change(module)
