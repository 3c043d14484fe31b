"""`arealite check CONFIG`: all that can be known of a run without starting it, and what it needs.

Refusals are those of `train`; here are the sums that a person would do: memory, staleness, disk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from arealite.api.config import ExperimentConfig, ServerConfig, run_paths
from arealite.api.trial import ClusterConfig
from arealite.base.model_folder import read_shapes
from arealite.cli import check, configs, options
from arealite.cli.fold import fold
from arealite.cli.info import said
from arealite.impl.publisher.shapes import Shapes
from arealite.system.data.tasks import load_split
from arealite.system.ledger.payloads import TOKEN_BYTES
from arealite.system.names.registry import NameRegistry

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Line = tuple[str, str]


def main(argv: Sequence[str]) -> int:
    """Print a line for each part of the run; what is wrong ends it with one line, as in `train`."""
    layers = options.parse_stages(
        argv,
        command="arealite check",
        about="Check a run without starting it: config, model, data, servers, memory, disk.",
        schema=ExperimentConfig,
        default=configs.CONFIG_DIR / "async_ppo.yaml",
    )
    stages = configs.load_stages(layers)
    for config in stages:
        check.check_options(config)
    for number, config in enumerate(stages, start=1):
        if len(stages) > 1:
            print(f"stage {number} of {len(stages)}")
        made = [str(run_paths(earlier).export) for earlier in stages[: number - 1]]
        if config.model.path in made and not Path(config.model.path).exists():
            print(f"{'model':<10} comes from an earlier stage; look again when that has ended")
            continue
        for what, told in report(config):
            print(fold(f"{what:<10} {told}"), flush=True)
    print("ok: nothing was found that would keep it from starting")
    return 0


def report(config: ExperimentConfig) -> Iterator[Line]:
    """Check one run and yield what there is to say, part by part.

    Raises:
        UserError: what would keep it from starting.
    """
    model = check.check_model(config.model.path)
    shapes = read_shapes(Path(config.model.path).expanduser())
    numel = count(shapes)
    kind, context = model.get("model_type", "?"), model.get("max_position_embeddings", "?")
    yield "model", f"{kind}, {numel / 1e6:,.2f} M parameters, context {context}"
    check.check(config, has_servers=bool(config.llm_server.addresses or _servers(config)))
    if not config.trainer.is_offline:
        counts = [len(load_split(config, split)) for split in ("train", "eval")]
        yield "data", f"{counts[0]} tasks to train, {counts[1]} held out"
        yield "servers", _about_servers(config)
        yield "staleness", staleness(config)
    needed = dict(memory(config, model, shapes))
    yield from (("memory", f"{who}: about {decimal(int(size))}") for who, size in needed.items())
    yield from _too_little(config, needed)
    yield "disk", disk(config, numel)


def memory(
    config: ExperimentConfig, model: dict[str, Any], shapes: Shapes
) -> Iterator[tuple[str, float]]:
    """Yield who needs how many bytes: parameters and moments exactly, activations roughly.

    Activations of a layer: 8 × hidden + 4 × intermediate numbers a token, of a layer that is
    recomputed its input only.
    """
    numel, trainer, ppo = count(shapes), config.trainer, config.trainer.ppo
    engine = trainer.offline.engine if trainer.is_offline else ppo.engine
    fsdp, ranks = engine.fsdp, config.launcher.trainer_ranks
    optimizer = trainer.offline.optimizer if trainer.is_offline else ppo.optimizer
    shards = fsdp.shard_size or ranks
    text = model.get("text_config") or model
    hidden = text.get("hidden_size") or text.get("n_embd", 0)
    layers = text.get("num_hidden_layers") or text.get("n_layer", 1)
    low, is_mixed = BYTES[fsdp.dtype], fsdp.dtype != "float32"
    trained = 8 + (8 if optimizer.type == "adamw" else 4)
    frozen = low * numel / shards
    if fsdp.lora.rank:
        names = tuple(f"{name}.weight" for name in fsdp.lora.targets)
        adapters = sum(
            fsdp.lora.rank * sum(shape) for name, shape in shapes.items() if name.endswith(names)
        )
        held = frozen + trained * adapters / shards
    else:
        gathered = numel if shards == 1 else 2 * numel / layers
        held = trained * numel / shards + low * gathered * is_mixed
    has_own_reference = ppo.kl.coef > 0 and not (fsdp.lora.rank and ppo.kl.reference == "initial")
    if not trainer.is_offline:
        held += frozen * has_own_reference + trained * numel / shards * (
            ppo.advantage.type == "gae"
        )
    inner = text.get("intermediate_size") or 4 * hidden
    width = hidden if fsdp.gradient_checkpointing else 8 * hidden + 4 * inner
    held += fsdp.max_tokens_per_microbatch * layers * width * low
    vocabulary = text.get("vocab_size") or 0
    logits = min(fsdp.logits_chunk, fsdp.max_tokens_per_microbatch * vocabulary)
    held += 4 * (2 * logits + hidden * vocabulary)
    yield f"trainer, each of {ranks}", held
    if trainer.is_offline:
        return
    for name, rows, kv_context, dtype in _own_servers(config, text):
        queries = text.get("num_attention_heads") or 1
        heads = text.get("num_key_value_heads") or queries
        size = text.get("head_dim") or hidden // queries
        each = BYTES.get(dtype, 2)
        weights = 0 if name == "shared server" else each * numel
        yield name, weights + 2 * layers * heads * size * each * rows * kv_context


def staleness(config: ExperimentConfig) -> str:
    """Say how many trajectories may be under way, and whether workers can use that."""
    ppo, workers = config.trainer.ppo, config.launcher.rollout_workers
    bound = (ppo.max_staleness + 1) * ppo.batch_size
    slots = workers * ppo.collector.concurrency
    text = (
        f"η={ppo.max_staleness}: (η + 1) × batch_size = {bound} trajectories under way at most, "
        f"{workers} × concurrency = {slots} slots for them"
    )
    if slots < min(bound, ppo.batch_size):
        return (
            f"{text}; a batch takes {math.ceil(ppo.batch_size / slots)} rounds: raise concurrency"
        )
    if slots > bound:
        return f"{text}; {slots - bound} stay empty: raise max_staleness to use them"
    return text


def disk(config: ExperimentConfig, numel: int) -> str:
    """Say what checkpoints, export and ledger will take, beside what is free."""
    paths, ppo = run_paths(config), config.trainer.ppo
    offline = config.trainer.offline if config.trainer.is_offline else None
    kept = offline.checkpoint_keep if offline else ppo.checkpoint.keep
    saved = 12 * numel * (kept + 1) + BYTES[ppo.engine.fsdp.dtype] * numel
    tokens = ppo.total_steps * ppo.batch_size * ppo.collector.sampling.max_new_tokens
    ledger = 0 if offline else TOKEN_BYTES * tokens
    free = check.check_run_folder(config)
    text = (
        f"{paths.root}: at most {decimal(int(saved))} of checkpoints and export, "
        f"{decimal(int(ledger))} of answers; {decimal(free)} free"
    )
    return text + (". WARNING: it may fill up" if saved + ledger > free else "")


def _servers(config: ExperimentConfig) -> list[str]:
    return [str(e.value["address"]) for e in NameRegistry.of(config).list("llm_server")]


def _about_servers(config: ExperimentConfig) -> str:
    if found := [*config.llm_server.addresses, *_servers(config)]:
        return ", ".join(found)
    if check.serves_itself(config):
        return "started with the run" if config.launcher.llm_servers else "the trainer itself"
    words = [f"{key}={getattr(config, key)}" for key in ("experiment_name", "trial_name")]
    given, usual = asdict(config.cluster), asdict(ClusterConfig())  # else nobody would find it
    words += [f"cluster.{key}={given[key]}" for key in given if given[key] != usual[key]]
    if config.cluster.bound != ServerConfig().llm_server.host:
        words.append(f"llm_server.host={config.cluster.bound}")
    words.append(f"model.path={config.model.path}")
    return f"none yet; start one: arealite serve-llm {' '.join(words)}"


def _own_servers(config: ExperimentConfig, text: Any) -> Iterator[tuple[str, int, int, str]]:
    """Yield name, rows, context and dtype of the servers that this run starts."""
    context, ppo = text.get("max_position_embeddings", 0), config.trainer.ppo
    if ppo.publisher.type == "shared":
        rows, dtype = ppo.publisher.shared.max_running_requests, ppo.engine.fsdp.dtype
        yield "shared server", rows, context, dtype  # the trainer's own model
    if servers := config.launcher.llm_servers:
        own = check.own_server(config)
        server, dtype, name = own.llm_server, own.model.dtype, f"server, each of {servers}"
        if server.type == "embedded":  # SGLang takes what mem_fraction gives it
            rows = server.embedded.max_running_requests
            yield name, rows, server.context_length or context, dtype


def _too_little(config: ExperimentConfig, needed: dict[str, float]) -> Iterator[Line]:
    """Warn where the roles of this host need more than it has."""
    counts = {who: int(who.rpartition(" ")[2]) if "each of" in who else 1 for who in needed}
    gpu, where = _gpu_memory(), "this host has free"
    has = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = sum(size * counts[who] for who, size in needed.items())
    if gpu:
        has, total, where = gpu, max(needed.values()), "a GPU has"
    if total > has and config.launcher.type == "local":
        yield "WARNING", f"that is {decimal(int(total))}, and {where} {decimal(int(has))}"


def _gpu_memory() -> int:
    """Return the bytes of this host's smallest GPU, 0 without one."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return min((int(word) << 20 for word in said(words).split() if word.isdigit()), default=0)


def count(shapes: Shapes) -> int:
    """Return the number of parameters in a model's files."""
    return sum(map(math.prod, shapes.values()))
