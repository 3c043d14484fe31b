"""Checks of the train engine against plain transformers in float32 on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, LoRAConfig, OptimizerConfig
from arealite.cli.machine.bench import SEED, Bench
from arealite.impl.demo.tiny_model import TinyModel, make_tiny_model
from arealite.impl.engine.attention import HAS_FLASH_ATTN
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.trainer.base import read_engines, write_engines

LR = 0.5
"""Learning rate of SGD: one update changes a log-probability by about 1."""
SGD = OptimizerConfig(type="sgd", beta1=0.0, clip_grad_norm=0.0, warmup_steps=0)
ADAMW = OptimizerConfig(warmup_steps=0)
BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a log-probability from the reference."""


def reference(bench: Bench) -> None:
    """Make the models; compute log-probabilities before and after an update in plain torch."""
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        bench.numbers |= {"device": properties.name, "flash_attn": HAS_FLASH_ATTN}
    make_models(bench.folder, quick=bench.plan["quick"])
    rows, found = make_rows(bench), dict[str, Any]()
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder / "window", dtype=torch.float32, attn_implementation="eager"
    )
    loss = torch.zeros(())
    found["before"] = [_logprobs(model, row) for row in rows]
    for row, logprobs in zip(rows, found["before"], strict=True):
        loss -= (logprobs * torch.from_numpy(row.fields["loss_weight"])).sum()
    loss.backward()
    with torch.no_grad():
        norm = sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
        found["after"] = [_logprobs(model, row) for row in rows]
    arrays = {name: torch.cat(each).detach().numpy() for name, each in found.items()}
    np.savez(bench.folder / "window.npz", norm=norm, **arrays)
    change = np.abs(arrays["after"] - arrays["before"]).mean()
    bench.numbers["mean change by the update"] = float(change)


def update(bench: Bench, **options: Any) -> None:
    """Compare log-probabilities before and after one update, and the gradient's norm."""
    has_lora, rows = "lora" in options, make_rows(bench)
    if has_lora:
        options["lora"] = LoRAConfig(rank=options["lora"])
    engine, expected = make_engine(bench, "window", **options), np.load(bench.folder / "window.npz")
    bound, starts = BOUNDS[engine.config.dtype], np.cumsum([0, *(len(row.tokens) for row in rows)])
    places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in _mine(bench)])

    def compare(what: str, key: str) -> None:
        found = np.concatenate(engine.forward(*_split(bench, rows))["logprobs"])
        bench.bound(what, float(np.abs(found - expected[key][places]).max()), bound)

    compare("error", "before")
    stats = train(bench, engine)
    if not has_lora:
        compare("error after the update", "after")
        error = abs(stats["grad_norm"] / float(expected["norm"]) - 1)
        bench.bound("error of the gradient's norm", error, bound)
    seconds = bench.seconds(lambda: train(bench, engine), repeat=1)
    bench.numbers["tokens/s"] = round(stats["tokens"] / seconds)


def repeat(bench: Bench, *, save: bool = False) -> None:
    """Train two engines equally; `save`: the second one resumes from a checkpoint of the first."""
    first, second = (make_engine(bench, optimizer=ADAMW) for _ in range(2))
    path, rows = bench.folder / f"ranks-{bench.world.size}", make_rows(bench)
    train(bench, first)
    if save:
        write_engines(path, {".": first}, {"step": 1}, bench.world)
        read_engines(path, {".": second})
    else:
        train(bench, second)
    train(bench, first)
    train(bench, second)
    what = "a resumed engine ends" if save else "`arealite replay` fails here: two engines end"
    is_equal = first.fingerprint() == second.fingerprint()
    bench.require(is_equal, f"{what} with other parameters after equal updates")
    found = np.concatenate(first.forward(*_split(bench, rows, whole=True))["logprobs"])
    if save and bench.world.is_rank0:
        np.save(path / "after.npy", found)


def resume(bench: Bench, *, source: int) -> None:
    """Load the checkpoint of `source` ranks, train, and compare the log-probabilities."""
    engine, path = make_engine(bench, optimizer=ADAMW), bench.folder / f"ranks-{source}"
    read_engines(path, {".": engine})
    train(bench, engine)
    found = engine.forward(*_split(bench, make_rows(bench), whole=True))["logprobs"]
    error = np.abs(np.concatenate(found) - np.load(path / "after.npy")).max()
    bench.bound("error", float(error), BOUNDS["float32"])


def make_models(folder: Path, *, quick: bool) -> None:
    """Write `dense`, and `window`, in which every other layer has a sliding window.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen. No token
    ends an answer: a generation has exactly the length that is requested.
    """
    hidden, layers = (64, 2) if quick else (256, 4)
    scale, sizes = 1.2 / hidden**0.5, {"hidden": hidden, "layers": layers, "kv_heads": 2}
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    for name, changes in {"dense": {}, "window": window}.items():
        path = make_tiny_model(folder / name, TinyModel(context=4096, init_std=scale, **sizes))
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            values = json.loads((path / file).read_text()) | {"eos_token_id": None}
            values |= changes if file == "config.json" else {"eos_token": None}
            (path / file).write_text(json.dumps(values))


def make_rows(bench: Bench) -> list[Sequence]:
    """Draw rows of different lengths, some longer than the window; loss on scattered tokens."""
    rng, longest = np.random.default_rng(SEED), 40 if bench.plan["quick"] else 300
    rows = list[Sequence]()
    for length in rng.integers(3, longest, 12):
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        mask[-1] = True
        weight = (mask * rng.normal(0.5, 1.0, length) / 6 / longest).astype(np.float32)
        tokens = rng.integers(3, 90, length).astype(np.int32)
        rows.append(Sequence(tokens, mask, float(rng.uniform(0.7, 1.3)), {"loss_weight": weight}))
    return rows


def make_engine(
    bench: Bench, model: str = "dense", *, optimizer: OptimizerConfig = SGD, **options: Any
) -> FSDPEngine:
    """Load a model of the bench; small micro-batches, so that there are several."""
    config = FSDPConfig(**{"max_tokens_per_microbatch": 128, **options})
    training = Training(optimizer, LR if optimizer is SGD else 1e-3, 1000)
    path = str(bench.folder / model)
    return FSDPEngine(config, model_path=path, seed=SEED, training=training)


def train(bench: Bench, engine: FSDPEngine) -> dict[str, float]:
    """Apply one update on the rows of `make_rows`; return its stats."""
    return engine.train_batch(*_split(bench, make_rows(bench)), weighted_loss)


def weighted_loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted sum of negative log-probabilities."""
    return -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum(), {}


def _mine(bench: Bench) -> range:
    return range(bench.world.rank, 12, bench.world.size)


def _split(
    bench: Bench, rows: list[Sequence], *, whole: bool = False
) -> tuple[list[Sequence], list[list[int]]]:
    """Return (rows of this rank, or all if `whole`; the lengths of the rows of each rank)."""
    size = bench.world.size
    parts = [rows if whole else rows[rank::size] for rank in range(size)]
    return parts[bench.world.rank], [[len(row.tokens) for row in part] for part in parts]


def _logprobs(model: Any, row: Sequence) -> torch.Tensor:
    """Return the log-probability of each token, 0 outside the loss mask."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(tokens[None, :-1]).logits[0].float() / row.temperature
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found]) * torch.from_numpy(row.loss_mask)
