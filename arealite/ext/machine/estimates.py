"""Estimate memory, concurrent episodes and disk of a run. `arealite check` prints the results."""

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.filesize import decimal

from arealite.api.engine_config import FSDPConfig, LoRAConfig
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.hooks import RunFacts
from arealite.api.payloads import TOKEN_BYTES
from arealite.base.model_folder import Shapes, text_part
from arealite.cli import configs
from arealite.ext.machine.info import output_of
from arealite.ext.models.adapter_folder import adapted, counted
from arealite.ext.models.adapter_options import lora_of
from arealite.ext.self_check.free_memory import available_memory

ModelJson = dict[str, Any]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Need(NamedTuple):
    """Memory of the processes of one role."""

    role: str
    processes: int
    size: float
    """Bytes of one process."""


def memory(
    config: ExperimentConfig, model: ModelJson, shapes: Shapes, longest: int | None = None
) -> Iterator[Need]:
    """Yield the memory of the trainer ranks and of the servers that the run starts.

    Args:
        config: The run.
        model: config.json of the model.
        shapes: The shape of each tensor of the model.
        longest: Tokens of the longest request; None: requests may fill the context.
    """
    ranks = config.launcher.trainer_ranks
    text_model = text_part(model)
    context = text_model.get("max_position_embeddings") or sys.maxsize
    yield Need(
        role=f"trainer, each of {ranks}",
        processes=ranks,
        size=_trainer_bytes(config, text_model, shapes, min(longest or 0, context)),
    )
    if not config.trainer.is_offline:
        yield from _servers(config, text_model, count(shapes), longest or sys.maxsize)


def memory_lines(
    config: ExperimentConfig, model: ModelJson, shapes: Shapes, longest: int | None
) -> Iterator[tuple[str, str]]:
    """Yield a line for each role, and a warning if this host has too little memory."""
    needs = [*memory(config, model, shapes, longest)]
    for need in needs:
        yield "memory", f"{need.role}: about {decimal(int(need.size))}"
    gpu_bytes = _gpu_memory()
    if gpu_bytes:
        owner = "a GPU has"
        available_bytes = gpu_bytes
        needed_bytes = max(need.size for need in needs)
    else:
        owner = "this host has free"
        available_bytes = available_memory()
        needed_bytes = sum(need.size * need.processes for need in needs)
    if needed_bytes > available_bytes and config.launcher.type == "local":
        needed = decimal(int(needed_bytes))
        available = decimal(int(available_bytes))
        yield "WARNING", f"{needed} in total, but {owner} {available}"


def staleness(config: ExperimentConfig) -> str:
    """Compare the trajectories that the staleness bound allows with the slots of the workers."""
    ppo = config.trainer.ppo
    workers = config.launcher.rollout_workers
    bound = (ppo.max_staleness + 1) * ppo.batch_size
    slots = workers * ppo.collector.concurrency
    line = (
        f"η={ppo.max_staleness}: at most (η + 1) × batch_size = {bound} trajectories in flight, "
        f"{workers} × concurrency = {slots} slots"
    )
    if slots < ppo.batch_size:
        rounds = math.ceil(ppo.batch_size / slots)
        return f"{line}; a batch takes {rounds} rounds: raise concurrency"
    if slots > bound:
        return f"{line}; {slots - bound} slots stay empty: raise max_staleness to use them"
    return line


def short_warm_ups(config: ExperimentConfig, facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield a warning for each optimizer whose learning rate never reaches `lr` (hook `check`)."""
    trainer = config.trainer
    ppo = config.trainer.ppo
    if trainer.is_offline:
        updates = trainer.offline.total_steps(facts.num_rows)
        optimizers = {"trainer.offline": trainer.offline.optimizer}
    else:
        updates = ppo.total_steps * ppo.updates * ppo.epochs
        optimizers = {"trainer.ppo": ppo.optimizer}
        if ppo.advantage.has_critic:
            optimizers["trainer.ppo.critic"] = ppo.critic.optimizer
    for section, optimizer in optimizers.items():
        warmup = optimizer.warmup_steps
        if updates < warmup:
            warning = (
                f"{section}.optimizer.warmup_steps={warmup}, "
                f"but the run has only {updates} optimizer updates: "
                f"the learning rate ends at {updates / warmup:.0%} of {section}.lr. "
                "Use fewer warm-up steps, or train for longer"
            )
            yield "warm-up", warning


def adapters(config: ExperimentConfig, shapes: Shapes) -> str:
    """Describe which linear layers have adapters, and which have none."""
    lora = lora_of(config, shapes)
    with_adapter = list[str]()
    without_adapter = list[str]()
    for name, is_adapted in adapted(shapes, lora.targets).items():
        leaf = name.rpartition(".")[2]
        if is_adapted:
            with_adapter.append(leaf)
        else:
            without_adapter.append(leaf)
    line = f"rank {lora.rank}, alpha {lora.alpha:g}, on {counted(with_adapter)}"
    if without_adapter:
        line += f"; none on {counted(without_adapter)}"
    return line


def disk(config: ExperimentConfig, numel: int, free_bytes: int) -> str:
    """Estimate the size of checkpoints, export and ledger; compare it with the free space."""
    trainer = config.trainer
    ppo = config.trainer.ppo
    max_tokens = ppo.total_steps * ppo.batch_size * ppo.collector.sampling.max_new_tokens
    if trainer.is_offline:
        num_checkpoints = trainer.offline.checkpoint_keep
        ledger_bytes = 0
    else:
        num_checkpoints = ppo.checkpoint.keep
        ledger_bytes = TOKEN_BYTES * max_tokens
    checkpoint_bytes = 12 * numel * (num_checkpoints + 1)
    export_bytes = BYTES[trainer.selected_options.engine.fsdp.dtype] * numel
    model_bytes = checkpoint_bytes + export_bytes
    line = (
        f"{run_paths(config).root}: at most {decimal(model_bytes)} of checkpoints and export, "
        f"{decimal(ledger_bytes)} of answers; {decimal(free_bytes)} free"
    )
    if model_bytes + ledger_bytes > free_bytes:
        line += ". WARNING: it may fill up"
    return line


def count(shapes: Shapes) -> int:
    """Return the number of parameters in a model's files."""
    return sum(map(math.prod, shapes.values()))


def _trainer_bytes(
    config: ExperimentConfig, text_model: ModelJson, shapes: Shapes, row_tokens: int
) -> float:
    """Return the bytes of one rank: parameters and moments exactly, activations approximately.

    Args:
        config: The run.
        text_model: The text part of the model's config.json.
        shapes: The shape of each tensor of the model.
        row_tokens: Tokens of the longest row, 0 if unknown; context parallelism divides them.
    """
    fsdp = config.trainer.selected_options.engine.fsdp
    max_tokens = max(
        fsdp.max_tokens_per_microbatch,
        math.ceil(row_tokens / fsdp.context_parallel),
    )
    parameter_bytes = _parameter_bytes(config, text_model, shapes)
    return parameter_bytes + _activation_bytes(fsdp, text_model, max_tokens)


def _parameter_bytes(config: ExperimentConfig, text_model: ModelJson, shapes: Shapes) -> float:
    """Return the bytes of one rank's parameters, gradients and moments, of all its models."""
    trainer = config.trainer
    ppo = config.trainer.ppo
    fsdp = trainer.selected_options.engine.fsdp
    numel = count(shapes)
    shards = fsdp.shard_size or config.launcher.trainer_ranks
    element_bytes = BYTES[fsdp.dtype]
    frozen_bytes = element_bytes / shards
    trained_bytes = (16 if trainer.selected_options.optimizer.type == "adamw" else 12) / shards
    lora = lora_of(config, shapes)
    if lora.rank:
        adapter_numel = lora.rank * _adapter_sides(shapes, lora)
        size = frozen_bytes * numel + trained_bytes * adapter_numel
    else:
        size = trained_bytes * numel
        if fsdp.dtype != "float32":
            _, layers = _hidden_and_layers(text_model)
            gathered_numel = numel if shards == 1 else 2 * numel / layers
            size += element_bytes * gathered_numel
    if trainer.is_offline:
        return size
    is_base_reference = lora.rank and ppo.kl.reference == "initial"
    if ppo.kl.coef > 0 and not is_base_reference:
        size += frozen_bytes * numel
    if ppo.advantage.has_critic:  # the critic
        size += trained_bytes * numel
    return size


def _adapter_sides(shapes: Shapes, lora: LoRAConfig) -> int:
    """Return the summed rows and columns of adapted matrices: parameters of adapters of rank 1."""
    layers = adapted(shapes, lora.targets).items()
    return sum(sum(shapes[f"{name}.weight"]) for name, is_adapted in layers if is_adapted)


def _activation_bytes(fsdp: FSDPConfig, text_model: ModelJson, max_tokens: int) -> float:
    """Return the bytes of the activations and logits of a micro-batch of `max_tokens`.

    A layer has 8 × hidden + 4 × intermediate activations per token. If layers are recomputed, one
    layer at a time has all of them, and each other layer keeps its input only.
    """
    hidden, layers = _hidden_and_layers(text_model)
    intermediate = text_model.get("intermediate_size") or 4 * hidden
    layer_width = 8 * hidden + 4 * intermediate
    width = layers * layer_width
    if fsdp.gradient_checkpointing:
        width = layer_width + layers * hidden
    vocabulary = text_model.get("vocab_size") or 0
    logits = min(fsdp.logits_chunk, max_tokens * vocabulary)
    layer_bytes = max_tokens * width * BYTES[fsdp.dtype]
    return layer_bytes + 4 * (2 * logits + hidden * vocabulary)


def _servers(
    config: ExperimentConfig, text_model: ModelJson, numel: int, longest: int
) -> Iterator[Need]:
    """Yield the memory of the servers that this run starts: weights and KV cache.

    The cache has a row for each request, as long as the longest request.
    """
    context = text_model.get("max_position_embeddings", 0)
    ppo = config.trainer.ppo
    cache_width = _cache_width(text_model)
    if ppo.publisher.type == "shared":  # generates with the trainer's weights
        max_rows = ppo.publisher.shared.max_running_requests
        cache_numel = cache_width * max_rows * min(context, longest)
        yield Need(
            role="shared server",
            processes=1,
            size=BYTES[ppo.engine.fsdp.dtype] * cache_numel,
        )
    num_servers = config.launcher.llm_servers
    if not num_servers:
        return
    server = configs.own_server(config)
    if server.llm_server.type == "embedded":  # SGLang takes what mem_fraction gives it
        max_rows = server.llm_server.embedded.max_running_requests
        row_tokens = min(server.llm_server.context_length or context, longest)
        cache_numel = cache_width * max_rows * row_tokens
        yield Need(
            role=f"server, each of {num_servers}",
            processes=num_servers,
            size=BYTES.get(server.model.dtype, 2) * (numel + cache_numel),
        )


def _cache_width(text_model: ModelJson) -> int:
    """Return the number of elements of a token's keys and values in all layers."""
    hidden, layers = _hidden_and_layers(text_model)
    query_heads = text_model.get("num_attention_heads") or 1
    key_heads = text_model.get("num_key_value_heads") or query_heads
    head_dim = text_model.get("head_dim") or hidden // query_heads
    return 2 * layers * key_heads * head_dim


def _hidden_and_layers(text_model: ModelJson) -> tuple[int, int]:
    """Return the hidden size and the number of layers; GPT-2 has other names for them."""
    hidden = text_model.get("hidden_size") or text_model.get("n_embd", 0)
    layers = text_model.get("num_hidden_layers") or text_model.get("n_layer", 1)
    return hidden, layers


def _gpu_memory() -> int:
    """Return the bytes of this host's smallest GPU, 0 without one."""
    output = output_of(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
    )
    sizes_mib = [int(word) for word in output.split() if word.isdigit()]
    return min(sizes_mib, default=0) << 20
