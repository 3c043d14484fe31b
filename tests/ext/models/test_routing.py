"""Replay of the experts that a server chose, for each family of mixtures of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.api.engine import Sequence
from arealite.base.errors import InvariantError, UserError
from arealite.ext.embedded.cache_decoder import make_decoder
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.models.expert_routing import Routing
from arealite.impl.engine.extensions import Extensions
from arealite.impl.engine.fsdp import FSDPEngine
from tests.families.configs import CONFIGS
from tests.families.folders import build
from tests.impl.engine import worker
from tests.impl.engine.helpers import (
    LOSS,
    assert_close,
    gradients,
    make_engine,
    make_rows,
    random_record,
    weights,
)
from tests.impl.engine.worker import EXPERTS
from tests.models import tiny_mixture, tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("group")

MIXTURES = [
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"),
    *("glm4_moe_lite", "olmoe", "granitemoe", "dots1", "minimax_m2", "llama4_text", "lfm2_moe"),
    *("qwen3_next", "qwen3_5_moe_text", "jamba", "granitemoehybrid", "ernie4_5_moe"),
    *("nemotron_h", "minimax", "kimi_linear"),
]


@contextmanager
def experts_used(model: Any) -> Iterator[list[torch.Tensor]]:
    """Yield a list of the experts that each layer's product of experts gets, [tokens, k]."""
    used: list[torch.Tensor] = []

    def note(module: Any, args: Any, options: Any) -> None:
        given = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
        whole = [each for each in given if not each.is_floating_point()]
        # Llama 4 gives every expert all tokens, those of other experts as zeros.
        sizes = [*given[0].reshape(4, -1, given[0].shape[-1]).abs().sum(-1)] if not whole else []
        used.append(whole[0] if whole else torch.stack(sizes).topk(1, 0).indices.T)

    named = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in named]
    yield used
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_of_every_family_use_recorded_experts(family: str) -> None:
    model = build(family, CONFIGS[family])
    routing = Routing.of(model)
    assert routing is not None
    ids, draw = torch.arange(3, 27).reshape(2, 12), np.random.default_rng(0)
    layers, count, k = routing.experts
    with torch.no_grad(), experts_used(model) as used, routing.capture() as captured:
        free = model(input_ids=ids).logits
    (found,) = captured
    assert found.shape == (24, layers, k)
    sparse = [layer for layer in range(layers) if found[:, layer].any()]
    for layer, each in zip(sparse, used, strict=True):
        assert np.array_equal(np.sort(found[:, layer]), each.reshape(24, k).sort(-1).values)
    chosen = np.stack([draw.permutation(count)[:k] for _ in range(24 * layers)])
    record = torch.from_numpy(chosen.astype(np.uint8)).reshape(2, 12, layers * k)
    record[0, :3] = 255
    with torch.no_grad(), experts_used(model) as used:
        routing.replay(record)
        forced = model(input_ids=ids).logits
    stats = routing.stats()
    assert stats["routing_compared"] == 21 * len(sparse) > stats["routing_matched"]
    wanted = chosen.reshape(24, layers, k)
    for layer, each in zip(sparse, used, strict=True):
        assert np.array_equal(np.sort(wanted[3:, layer]), each.reshape(24, k)[3:].sort(-1).values)
    assert torch.equal(forced[0, :3], free[0, :3])
    assert not torch.allclose(forced[0, 3:], free[0, 3:])


def test_weights_of_recorded_experts_come_from_the_routers_scores() -> None:
    model = build("qwen3_moe", CONFIGS["qwen3_moe"] | {"norm_topk_prob": True})
    routing, ids = Routing.of(model), torch.arange(3, 15)[None]
    assert routing is not None
    gate, found = model.model.layers[0].mlp.gate, {}
    gate.register_forward_hook(lambda module, args, out: found.update(out=out))
    record = torch.tensor([1, 3, 0, 2], dtype=torch.uint8).expand(1, 12, 4)
    routing.replay(record)
    model(input_ids=ids)
    logits, scores, chosen = found["out"]
    assert chosen.tolist() == [[1, 3]] * 12
    expected = logits[:, [1, 3]].softmax(-1)  # the two probabilities, normalised again
    torch.testing.assert_close(scores, expected)
    scores[:, 0].sum().backward()
    assert gate.weight.grad[[1, 3]].abs().min() > 0


def test_deepseek_v2_weights_ignore_the_mask_of_the_trainers_own_groups() -> None:
    model = build("deepseek_v2", CONFIGS["deepseek_v2"])
    routing, found = Routing.of(model), {}
    assert routing is not None
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda module, args, out: found.update(out=out))
    routing.replay(torch.tensor([0, 0, 0, 2], dtype=torch.uint8).expand(1, 12, 4))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 15)[None])
    logits, weights, _ = found["out"]
    scale = model.config.routed_scaling_factor
    torch.testing.assert_close(weights, scale * logits.softmax(-1)[:, [0, 2]])


def rows_of_server(path: Path, dtype: str) -> list[Sequence]:
    """Sample rows with their experts; two requests are retracted and prefilled again."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    decoder, draw = make_decoder(model, max_rows=8, seed=0), np.random.default_rng(0)
    prompts = [draw.integers(3, 64, 5 + i).tolist() for i in range(6)]
    requests = [
        Generation(
            rid=str(i),
            prompt=ids,
            sampling=SamplingParams(),
            limit=20 + i,
            stops=frozenset(),
            wants_routing=True,
        )
        for i, ids in enumerate([*prompts, prompts[0]])
    ]
    with torch.inference_mode():
        waiting = deque(requests)
        while waiting:
            decoder.prefill(waiting)
        for _ in range(4):
            decoder.decode()
        waiting.extend(decoder.clear())
        while waiting or decoder.running:
            if waiting:
                decoder.prefill(waiting)
            decoder.decode()
            decoder.remove_ended()
    rows = []
    for each in requests:
        tokens = np.array(each.prompt + each.output, np.int32)
        mask = np.arange(len(tokens)) >= len(each.prompt)
        behaviour = np.zeros(len(tokens), np.float32)
        behaviour[mask] = each.logprobs
        record = np.concatenate(each.routing).astype(np.uint8).reshape(len(tokens) - 1, -1)
        record = np.pad(record, ((0, 1), (0, 0)), constant_values=255)
        fields = {name: behaviour for name in ("behav_logprobs", "prox_logprobs", "advantages")}
        fields["loss_weight"] = np.full(len(tokens), 0.01, np.float32)
        rows.append(
            Sequence(tokens=tokens, loss_mask=mask, temperature=1.0, fields=fields, routing=record)
        )
    return rows


def mismatch(engine: FSDPEngine, rows: list[Sequence]) -> float:
    """Return the mean difference between the engine's logprobs and the server's."""
    found = engine.forward(rows)["logprobs"]
    pairs = zip(rows, found, strict=True)
    all_ = [np.abs(row.fields["behav_logprobs"] - own)[row.loss_mask] for row, own in pairs]
    return float(np.concatenate(all_).mean())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    return tiny_mixture(tmp_path_factory.mktemp("mixture"), "deepseek_v3", **sizes)


def test_server_without_slots_records_the_experts_of_a_hybrid(tmp_path: Path) -> None:
    tiny_mixture(tmp_path, "qwen3_next", num_experts=16)
    rows, engine = rows_of_server(tmp_path, "float32"), make_engine(tmp_path)
    assert mismatch(engine, rows) < 1e-5
    stats = gradients(engine, rows)[1]
    assert stats["routing_matched"] == stats["routing_compared"] > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_replay_of_a_float32_server_has_no_routing_difference(mixture: Path, layout: str) -> None:
    rows = rows_of_server(mixture, "float32")
    engine = make_engine(mixture, layout=layout)
    assert mismatch(engine, rows) < 1e-5
    stats = gradients(engine, rows)[1]
    inputs = sum(len(row.tokens) - 1 for row in rows)
    if layout == "packed":  # tokens that rows share are compared once
        assert stats["computed_tokens"] < inputs
        inputs = int(stats["computed_tokens"])
    recorded = 3 * inputs  # one layer of four is dense
    assert stats["routing_matched"] == stats["routing_compared"] == recorded


def test_replay_makes_the_mismatch_of_a_low_precision_server_smaller(tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    tiny_mixture(tmp_path, "qwen3_moe", **sizes)
    rows, engine = rows_of_server(tmp_path, "bfloat16"), make_engine(tmp_path)
    replayed = mismatch(engine, rows)
    engine.replays_routing = False
    free = mismatch(engine, rows)
    assert replayed < 0.02 and free > 2 * replayed, (replayed, free)
    stats = gradients(engine, rows)[1]
    assert stats["routing_matched"] < stats["routing_compared"]


def test_layout_micro_batches_and_recomputation_do_not_change_replayed_gradients(
    mixture: Path,
) -> None:
    rows = random_record(make_rows(), mixture)
    told: list[dict[str, float]] = []
    options: list[dict[str, Any]] = [
        {"layout": "padded"},
        {"layout": "packed", "max_tokens_per_microbatch": 64},
        {"layout": "padded", "gradient_checkpointing": True, "max_tokens_per_microbatch": 100},
        {"layout": "packed", "cpu_offload": True, "gradient_checkpointing": True},
    ]
    expected, free = None, gradients(make_engine(mixture), make_rows())[0]
    for each in options:
        found, stats = gradients(make_engine(mixture, **each), rows)
        expected = expected or found
        assert_close(found, expected)
        told.append({name: stats[f"routing_{name}"] for name in ("matched", "compared")})
    assert {stats["matched"] / stats["compared"] for stats in told} == {
        told[0]["matched"] / told[0]["compared"]
    }
    assert expected is not None
    assert not torch.allclose(expected["lm_head.weight"], free["lm_head.weight"])


def test_record_of_a_router_without_topk_is_refused() -> None:
    model = build("phimoe", CONFIGS["phimoe"])
    routing = Routing.of(model)
    assert routing is not None
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), routing.capture() as captured:
        model(input_ids=ids)
    assert captured == []
    routing.replay(torch.zeros(1, 12, 4, dtype=torch.uint8))
    with torch.no_grad():
        model(input_ids=ids)
    with pytest.raises(UserError, match="call no topk"):
        routing.stats()


@pytest.mark.parametrize("choice", [[0, 1, 2, 2], [0, 1, 2, 16], [0]])
def test_invalid_record_is_refused_before_the_update(mixture: Path, choice: list[int]) -> None:
    rows = make_rows(2)
    rows[0].routing = np.tile(np.array(4 * choice, np.uint8), (len(rows[0].tokens), 1))
    engine = make_engine(mixture)
    what = "4 bytes of routing" if len(choice) == 1 else "choices of experts are invalid"
    with pytest.raises(InvariantError, match=what):
        engine.train_batch(rows, LOSS)


def balanced_gradients(path: Path, rows: list[Sequence]) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients of the balancing loss alone, row by row by transformers, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens, loss = sum(len(row.tokens) - 1 for row in rows), torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(row.tokens[:-1].astype(np.int64))[None]
        own = model(input_ids=ids).aux_loss
        loss = loss + own * (len(row.tokens) - 1) / tokens
    (model.config.router_aux_loss_coef * loss).backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return grads, float(loss.detach())


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose config asks for a strong balancing loss."""
    path = tmp_path_factory.mktemp("balanced")
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return tiny_model(
        path, family="mixtral", num_local_experts=4, tie_word_embeddings=False, **asks
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_balancing_loss_of_the_config_is_added_once_per_update(
    balanced: Path, layout: str, recomputes: bool
) -> None:
    rows = make_rows()
    options = {"layout": layout, "gradient_checkpointing": recomputes}
    engine = make_engine(balanced, max_tokens_per_microbatch=100, **options)
    found, stats = gradients(engine, rows)
    engine._extensions = Extensions([])
    plain, _ = gradients(engine, rows)
    expected, loss = balanced_gradients(balanced, rows)
    assert stats["router_loss"] == pytest.approx(loss, rel=1e-5)
    names = [name for name in expected if name.endswith("gate.weight")]
    assert len(names) == 2
    for name in names:
        torch.testing.assert_close(found[name] - plain[name], expected[name], rtol=1e-3, atol=1e-6)


def test_server_answers_for_a_model_whose_config_asks_for_a_balancing_loss(balanced: Path) -> None:
    rows = rows_of_server(balanced, "float32")
    assert mismatch(make_engine(balanced), rows) < 1e-5
    model = AutoModelForCausalLM.from_pretrained(balanced).eval()
    assert type(make_decoder(model, max_rows=1, seed=0)) is Decoder


def test_no_balancing_loss_is_added_unless_the_config_asks(mixture: Path, tmp_path: Path) -> None:
    silent = tiny_model(tmp_path, family="mixtral", num_local_experts=4)
    for path in (silent, mixture):
        rows = make_rows(3)
        assert "router_loss" not in gradients(make_engine(path), rows)[1]


@pytest.mark.processes
@pytest.mark.parametrize("family", ["mixture", "balanced"])
def test_two_ranks_update_a_mixture_as_one_rank(
    request: pytest.FixtureRequest, tmp_path: Path, family: str
) -> None:
    model: Path = request.getfixturevalue(family)
    ranks = [{"WORLD_SIZE": "2", "RANK": str(rank)} for rank in range(2)]
    assert run_ranks(worker.main, ("experts", tmp_path, str(model)), ranks) == [0, 0]
    of_ranks = [torch.load(tmp_path / f"out-{rank}.pt", weights_only=False) for rank in range(2)]
    for name, options in EXPERTS.items():
        if family == "balanced" and "context_parallel" in options:
            continue
        rows = random_record(make_rows(), model)
        engine = make_engine(model, optimizer={"type": "sgd"})
        found, stats = gradients(engine, rows, LOSS, updates=True)
        for out in of_ranks:
            assert_close(out[name]["gradients"], found)
        assert_close(of_ranks[0][name]["weights"], weights(engine))
        told = of_ranks[0][name]["stats"]
        if "context_parallel" not in options:
            times = 2 if "gradient_checkpointing" in options else 1  # recomputation counts again
            assert told["routing_matched"] == times * stats["routing_matched"]
            assert told["routing_compared"] == times * stats["routing_compared"]
        assert told.get("router_loss") == pytest.approx(stats.get("router_loss"))


def test_experts_run_as_a_grouped_product_that_equals_a_loop_over_experts(mixture: Path) -> None:
    rows, found = random_record(make_rows(), mixture), {}
    for kind in ("grouped_mm", "eager"):
        engine = make_engine(mixture)
        assert engine.module.config._experts_implementation == "grouped_mm"
        engine.module.set_experts_implementation(kind)
        found[kind] = gradients(engine, rows)[0]
    assert_close(found["grouped_mm"], found["eager"])
