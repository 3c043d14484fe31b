"""Estimate memory, concurrent episodes and disk of a run. `arealite check` prints the results."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rich.filesize import decimal

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine_config import LoRAConfig
from arealite.base.adapter_folder import adapted, counted, read_adapter
from arealite.base.errors import UserError
from arealite.base.host import available_memory
from arealite.base.model_folder import Shapes, text_part
from arealite.cli import configs
from arealite.cli.info import output_of
from arealite.system.ledger.payloads import TOKEN_BYTES

Json = dict[str, Any]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Need(NamedTuple):
    """Memory of the processes of one role."""

    role: str
    processes: int
    size: float
    """Bytes of one process."""


def memory(
    config: ExperimentConfig, model: Json, shapes: Shapes, longest: int | None = None
) -> Iterator[Need]:
    """Yield the memory of the trainer ranks and of the servers that the run starts.

    Args:
        config: The run.
        model: config.json of the model.
        shapes: The shape of each tensor of the model.
        longest: Tokens of the longest request; None: requests may fill the context.
    """
    ranks = config.launcher.trainer_ranks
    text = text_part(model)
    row = min(longest or 0, text.get("max_position_embeddings") or sys.maxsize)
    yield Need(f"trainer, each of {ranks}", ranks, _trainer_bytes(config, text, shapes, row))
    if not config.trainer.is_offline:
        yield from _servers(config, text, count(shapes), longest or sys.maxsize)


def memory_lines(
    config: ExperimentConfig, model: Json, shapes: Shapes, longest: int | None
) -> Iterator[tuple[str, str]]:
    """Yield a line for each role, and a warning if this host has too little memory."""
    needs = [*memory(config, model, shapes, longest)]
    yield from (("memory", f"{need.role}: about {decimal(int(need.size))}") for need in needs)
    gpu = _gpu_memory()
    where = "this host has free"
    has = available_memory()
    total = sum(need.size * need.processes for need in needs)
    if gpu:
        has = gpu
        total = max(need.size for need in needs)
        where = "a GPU has"
    if total > has and config.launcher.type == "local":
        yield "WARNING", f"{decimal(int(total))} in total, but {where} {decimal(int(has))}"


def staleness(config: ExperimentConfig) -> str:
    """Compare the trajectories that the staleness bound allows with the slots of the workers."""
    ppo = config.trainer.ppo
    workers = config.launcher.rollout_workers
    bound = (ppo.max_staleness + 1) * ppo.batch_size
    slots = workers * ppo.collector.concurrency
    text = f"η={ppo.max_staleness}: at most (η + 1) × batch_size = {bound} trajectories in flight"
    text += f", {workers} × concurrency = {slots} slots"
    if slots < ppo.batch_size:
        rounds = math.ceil(ppo.batch_size / slots)
        return f"{text}; a batch takes {rounds} rounds: raise concurrency"
    if slots > bound:
        return f"{text}; {slots - bound} slots stay empty: raise max_staleness to use them"
    return text


def short_warm_ups(config: ExperimentConfig, num_rows: int) -> Iterator[str]:
    """Yield a warning for each optimizer whose learning rate never reaches `lr`.

    Args:
        config: The run.
        num_rows: Number of training rows; only offline trainers use it.
    """
    trainer = config.trainer
    ppo = config.trainer.ppo
    if trainer.is_offline:
        updates = trainer.offline.total_steps(num_rows)
        optimizers = {"trainer.offline": trainer.offline.optimizer}
    else:
        updates = ppo.total_steps * ppo.updates * ppo.epochs
        optimizers = {"trainer.ppo": ppo.optimizer}
        if ppo.advantage.type == "gae":
            optimizers["trainer.ppo.critic"] = ppo.critic.optimizer
    for section, optimizer in optimizers.items():
        warmup = optimizer.warmup_steps
        if updates < warmup:
            text = f"{section}.optimizer.warmup_steps={warmup}, but the run has only {updates}"
            text += f" optimizer updates: the learning rate ends at {updates / warmup:.0%} of"
            yield f"{text} {section}.lr. Use fewer warm-up steps, or train for longer"


def lora_of(config: ExperimentConfig, shapes: Shapes) -> LoRAConfig:
    """Return the options of the run's adapters, from model.adapter where it is set.

    Raises:
        UserError: Adapter or targets do not fit the model, or options differ from the adapter.
    """
    lora = config.trainer.own.engine.fsdp.lora
    path = config.model.adapter
    if not path:
        if lora.targets != ["all-linear"] and "all-linear" in lora.targets:
            what = f"engine.fsdp.lora.targets {lora.targets}: all-linear means all layers"
            raise UserError(f"{what}. Remove the other names.")
        known = adapted(shapes, lora.targets)
        if lora.rank and known and not any(known.values()):
            what = f"engine.fsdp.lora.targets {lora.targets}: model.path has no such layer"
            listed = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise UserError(f"{what}. Use some of {listed}, or [all-linear].")
        return lora
    if config.trainer.type == "reward":
        raise UserError("trainer.type=reward cannot start from an adapter. Set model.adapter=null.")
    found = read_adapter(path, shapes)
    given = {"rank": found["r"], "alpha": found["lora_alpha"]}
    for name, value in given.items() if lora.rank else ():
        if getattr(lora, name) != value:
            what = f"engine.fsdp.lora.{name}={getattr(lora, name)}, but model.adapter has {value}"
            raise UserError(f"{what}. Remove engine.fsdp.lora.{name}.")
    named = found.get("target_modules")
    return replace(lora, **given, targets=named if isinstance(named, list) else ["all-linear"])


def adapters(config: ExperimentConfig, shapes: Shapes) -> str:
    """Describe which linear layers have adapters, and which have none."""
    lora = lora_of(config, shapes)
    layers = [(name.rpartition(".")[2], has) for name, has in adapted(shapes, lora.targets).items()]
    on, off = (counted(leaf for leaf, has in layers if has is wanted) for wanted in (True, False))
    return f"rank {lora.rank}, alpha {lora.alpha:g}, on {on}" + (f"; none on {off}" if off else "")


def disk(config: ExperimentConfig, numel: int, free_bytes: int) -> str:
    """Estimate the size of checkpoints, export and ledger; compare it with the free space."""
    trainer = config.trainer
    ppo = config.trainer.ppo
    kept = trainer.offline.checkpoint_keep if trainer.is_offline else ppo.checkpoint.keep
    saved = 12 * numel * (kept + 1) + BYTES[trainer.own.engine.fsdp.dtype] * numel
    tokens = ppo.total_steps * ppo.batch_size * ppo.collector.sampling.max_new_tokens
    ledger = 0 if trainer.is_offline else TOKEN_BYTES * tokens
    text = f"{run_paths(config).root}: at most {decimal(saved)} of checkpoints and export"
    text += f", {decimal(ledger)} of answers; {decimal(free_bytes)} free"
    return text + (". WARNING: it may fill up" if saved + ledger > free_bytes else "")


def count(shapes: Shapes) -> int:
    """Return the number of parameters in a model's files."""
    return sum(map(math.prod, shapes.values()))


def _trainer_bytes(config: ExperimentConfig, text: Json, shapes: Shapes, row: int) -> float:
    """Return the bytes of one rank: parameters and moments exactly, activations approximately.

    A layer has 8 × hidden + 4 × intermediate activations per token. If layers are recomputed, one
    layer at a time has all of them, and each other layer keeps its input only.

    Args:
        row: Tokens of the longest row, 0 if unknown; context parallelism divides them.
    """
    trainer = config.trainer
    ppo = config.trainer.ppo
    ranks = config.launcher.trainer_ranks
    own = trainer.own
    numel = count(shapes)
    fsdp = own.engine.fsdp
    shards = fsdp.shard_size or ranks
    low = BYTES[fsdp.dtype]
    hidden, layers = _hidden_and_layers(text)
    frozen = low / shards
    trained = (16 if own.optimizer.type == "adamw" else 12) / shards
    lora = lora_of(config, shapes)
    if lora.rank:
        layers_with = [name for name, has in adapted(shapes, lora.targets).items() if has]
        sides = sum(sum(shapes[f"{name}.weight"]) for name in layers_with)
        size = frozen * numel + trained * lora.rank * sides
    else:
        gathered = numel if shards == 1 else 2 * numel / layers
        size = trained * numel + low * gathered * (fsdp.dtype != "float32")
    if not trainer.is_offline:
        has_reference = ppo.kl.coef > 0 and not (lora.rank and ppo.kl.reference == "initial")
        size += frozen * numel * has_reference + trained * numel * (ppo.advantage.type == "gae")
    full = 8 * hidden + 4 * (text.get("intermediate_size") or 4 * hidden)
    width = full + layers * hidden if fsdp.gradient_checkpointing else layers * full
    tokens = max(fsdp.max_tokens_per_microbatch, math.ceil(row / fsdp.context_parallel))
    vocabulary = text.get("vocab_size") or 0
    logits = min(fsdp.logits_chunk, tokens * vocabulary)
    size += tokens * width * low
    return size + 4 * (2 * logits + hidden * vocabulary)


def _servers(config: ExperimentConfig, text: Json, numel: int, longest: int) -> Iterator[Need]:
    """Yield the memory of the servers that this run starts: weights and KV cache.

    The cache has a row for each request, as long as the longest request.
    """
    context = text.get("max_position_embeddings", 0)
    ppo = config.trainer.ppo
    queries = text.get("num_attention_heads") or 1
    heads = text.get("num_key_value_heads") or queries
    hidden, layers = _hidden_and_layers(text)
    token = 2 * layers * heads * (text.get("head_dim") or hidden // queries)
    if ppo.publisher.type == "shared":  # generates with the trainer's weights
        rows = ppo.publisher.shared.max_running_requests
        each = BYTES[ppo.engine.fsdp.dtype]
        yield Need("shared server", 1, token * each * rows * min(context, longest))
    if servers := config.launcher.llm_servers:
        own = configs.own_server(config)
        if own.llm_server.type == "embedded":  # SGLang takes what mem_fraction gives it
            rows = own.llm_server.embedded.max_running_requests
            each = BYTES.get(own.model.dtype, 2)
            width = min(own.llm_server.context_length or context, longest)
            yield Need(f"server, each of {servers}", servers, each * (numel + token * rows * width))


def _hidden_and_layers(text: Json) -> tuple[int, int]:
    hidden = text.get("hidden_size")
    layers = text.get("num_hidden_layers")
    return hidden or text.get("n_embd", 0), layers or text.get("n_layer", 1)


def _gpu_memory() -> int:
    """Return the bytes of this host's smallest GPU, 0 without one."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return min((int(word) << 20 for word in output_of(words).split() if word.isdigit()), default=0)
