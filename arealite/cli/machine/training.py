"""Checks of the train engine against plain transformers in float32 on the CPU."""

import json
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
        name = torch.cuda.get_device_name()
        bench.numbers |= {"device": name, "flash_attn": HAS_FLASH_ATTN}
    make_models(bench)
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder / "window", dtype=torch.float32, attn_implementation="eager"
    )
    rows = make_rows(bench)
    weights = torch.from_numpy(np.concatenate([row.fields["loss_weight"] for row in rows]))
    before = torch.cat([_logprobs(model, row) for row in rows])
    (-(before * weights).sum()).backward()
    with torch.no_grad():
        norm = sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
        after = torch.cat([_logprobs(model, row) for row in rows])
    np.savez(bench.folder / "window.npz", norm=norm, before=before.detach(), after=after)
    bench.numbers["mean change by the update"] = float((after - before).abs().mean())


def update(bench: Bench, **options: Any) -> None:
    """Compare log-probabilities before and after one update, and the gradient's norm."""
    if has_lora := "lora" in options:
        options["lora"] = LoRAConfig(rank=options["lora"])
    engine, expected = make_engine(bench, "window", **options), np.load(bench.folder / "window.npz")
    bound = BOUNDS[engine.config.dtype]
    bench.bound("error", np.abs(outputs(bench, engine) - expected["before"]).max(), bound)
    stats = train(bench, engine)
    if not has_lora:
        error = np.abs(outputs(bench, engine) - expected["after"]).max()
        bench.bound("error after the update", error, bound)
        error = abs(stats["grad_norm"] / expected["norm"] - 1)
        bench.bound("error of the gradient's norm", error, bound)
    seconds = bench.seconds(lambda: train(bench, engine), repeat=1)
    bench.numbers["tokens/s"] = round(stats["tokens"] / seconds)


def replay(bench: Bench) -> None:
    """Train two engines equally; their parameters must be equal bit for bit."""
    engines = [make_engine(bench, optimizer=ADAMW) for _ in range(2)]
    for engine in engines * 2:
        train(bench, engine)
    found = {engine.fingerprint() for engine in engines}
    what = "equal updates give different parameters"
    bench.require(len(found) == 1, f"{what}: `arealite replay` reports differences here")


def save(bench: Bench) -> None:
    """Write a checkpoint between two updates, and the log-probabilities after them."""
    engine, path = make_engine(bench, optimizer=ADAMW), bench.folder / f"ranks-{bench.world.size}"
    train(bench, engine)
    write_engines(path, {".": engine}, {"step": 1}, bench.world)
    train(bench, engine)
    np.save(path / f"after-{bench.world.rank}.npy", outputs(bench, engine))


def resume(bench: Bench, *, source: int) -> None:
    """Load the checkpoint of `source` ranks, and repeat the update after it."""
    engine, path = make_engine(bench, optimizer=ADAMW), bench.folder / f"ranks-{source}"
    read_engines(path, {".": engine})
    train(bench, engine)
    error = np.abs(outputs(bench, engine) - np.load(path / "after-0.npy")).max()
    bench.bound("error", error, 0.0 if source == bench.world.size else BOUNDS["float32"])


def make_models(bench: Bench) -> None:
    """Write `dense`, and `window`, in which every other layer has a sliding window.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen. No token
    ends an answer: a generation has exactly the length that is requested.
    """
    hidden, layers = (64, 2) if bench.plan["quick"] else (256, 4)
    scale, sizes = 1.2 / hidden**0.5, {"hidden": hidden, "layers": layers, "kv_heads": 2}
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    for name, changes in {"dense": {}, "window": window}.items():
        folder = bench.folder / name
        make_tiny_model(folder, TinyModel(context=4096, init_std=scale, **sizes))
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            values = json.loads((folder / file).read_text()) | {"eos_token_id": None}
            values |= changes if file == "config.json" else {"eos_token": None}
            (folder / file).write_text(json.dumps(values))


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
    return FSDPEngine(config, model_path=str(bench.folder / model), seed=SEED, training=training)


def train(bench: Bench, engine: FSDPEngine) -> dict[str, float]:
    """Apply one update on the rows, which the ranks share; return its stats."""
    rows, size = make_rows(bench), bench.world.size
    lengths = [[len(row.tokens) for row in rows[rank::size]] for rank in range(size)]
    return engine.train_batch(rows[bench.world.rank :: size], lengths, weighted_loss)


def outputs(bench: Bench, engine: FSDPEngine) -> np.ndarray:
    """Return the log-probabilities of all rows; every rank computes them."""
    rows = make_rows(bench)
    lengths = [[len(row.tokens) for row in rows]] * bench.world.size
    return np.concatenate(engine.forward(rows, lengths)["logprobs"])


def weighted_loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted sum of negative log-probabilities."""
    return -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum(), {}


def _logprobs(model: Any, row: Sequence) -> torch.Tensor:
    """Return the log-probability of each token, 0 outside the loss mask."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0, :-1] / row.temperature
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found]) * torch.from_numpy(row.loss_mask)
