"""The options of train engines and their optimizers.

Apart from the contract, because every trainer has them in its own branch of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule; the learning rate itself stands beside the algorithm."""

    type: Literal["adamw", "sgd"] = opt("adamw", "sgd has beta1 as its momentum, and no second one")
    beta1: float = opt(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = opt(0.95, "decay of the second moment", at_least=0, below=1)
    eps: float = opt(1e-8, "added to the second moment's root", above=0)
    weight_decay: float = opt(0.0, "decoupled, on matrices only", at_least=0)
    clip_grad_norm: float = opt(1.0, "global norm; 0 leaves gradients as they are", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "after the warm-up")
    warmup_steps: int = opt(10, "optimizer updates of linear warm-up", at_least=0)
    min_lr_ratio: float = opt(0.0, "end of the decay, as a share of lr", at_least=0)
    max_skipped_updates: int = opt(
        5,
        "updates skipped in a row, as gradients are not finite, that stop the run; 0: no limit",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (peft): the model itself stays as it is."""

    rank: int = opt(0, "of the adapters; 0 trains the model itself", at_least=0)
    alpha: float = opt(16.0, "adapters are scaled by alpha / rank")
    targets: list[str] = sub(
        lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "last names of the modules that get one",
    )


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Fully sharded data parallelism (FSDP2) over all ranks."""

    shard_size: int = opt(0, "ranks that share a copy; 0: all; fewer: HSDP; 1: DDP", at_least=0)
    max_tokens_per_microbatch: int = opt(
        8192, "computed tokens of a micro-batch; one longer row is allowed", at_least=1
    )
    layout: Literal["auto", "padded", "packed"] = opt(
        "auto", "rows of a micro-batch; auto: packed on CUDA, padded and sorted on a CPU"
    )
    dtype: Literal["float32", "bfloat16"] = opt("float32", "of compute; masters are float32")
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    cpu_offload: bool = opt(False, "keep parameters and optimizer state in the host's memory")
    logits_chunk: int = opt(2**25, "tokens × vocabulary at one time", at_least=1, at_most=2**40)
    lora: LoRAConfig = sub(LoRAConfig, "adapters instead of the whole model")


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig:
    """Which engine holds the model."""

    type: str = opt("fsdp", "name in the table of train engines")
    fsdp: FSDPConfig = sub(FSDPConfig, "options of type=fsdp")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Sharded, atomic checkpoints."""

    every_steps: int = opt(50, "0 checkpoints only at the end and on Ctrl-C", at_least=0)
    keep: int = opt(2, "newest checkpoints kept", at_least=1)
    export: bool = opt(True, "write a Hugging Face folder at the end")
