"""Options of train engines, optimizers and checkpoints."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import named, opt, part, sub

Head = Literal["lm", "value"]
"""Output per token: logprob and entropy (lm), or one number (value: critics, reward models)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule. The learning rate is an option of the algorithm."""

    type: Literal["adamw", "sgd"] = opt("adamw", "sgd: momentum beta1; beta2 and eps are unused")
    beta1: float = opt(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = opt(0.95, "decay of the second moment", at_least=0, below=1)
    eps: float = opt(1e-8, "added to the square root of the second moment", above=0)
    weight_decay: float = opt(0.0, "decoupled weight decay, of matrices only", at_least=0)
    clip_grad_norm: float = opt(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "of `lr` after the warm-up")
    warmup_steps: int = opt(10, "optimizer updates of linear warm-up", at_least=0)
    min_lr_ratio: float = opt(0.0, "final learning rate as a share of lr", at_least=0)
    max_skipped_updates: int = opt(5, "non-finite gradients in a row to stop; 0: never", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer and schedule of an engine. An engine without them is frozen (reference policy)."""

    optimizer: OptimizerConfig
    lr: float
    total_updates: int
    """Optimizer updates after which the schedule ends."""


NAMED_RANK = 32
"""Rank of an adapter by name, if there is no default adapter."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (peft) on a frozen model."""

    rank: int = opt(0, "rank of the adapters; 0: no adapters, all parameters train", at_least=0)
    alpha: float = opt(16.0, "adapters are scaled by alpha / rank")
    targets: list[str] = sub(
        lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "names of the modules that get an adapter; [all-linear]: all linear layers but the head",
    )
    only_named: bool = opt(
        False, "with rank=0: train adapters that are added by name, and no others"
    )
    mixed: bool = opt(True, "micro-batches have rows of several adapters; false: of one each")


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Fully sharded data parallelism (FSDP2) over all ranks."""

    shard_size: int = opt(0, "ranks that shard one copy; 0: all; fewer: HSDP; 1: DDP", at_least=0)
    context_parallel: int = opt(1, "ranks that share the tokens of each row", at_least=1)
    max_tokens_per_microbatch: int = opt(
        8192, "tokens of a rank's micro-batch, padding included; longer rows: one each", at_least=1
    )
    layout: Literal["auto", "padded", "packed"] = opt(
        "auto", "packed: computes equal prefixes once; auto: packed on CPUs, on CUDA in 16 bits"
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = opt(
        "float32",
        "dtype of compute; master weights are float32; float16 scales the loss; auto: bfloat16 if "
        "this machine has a GPU or processor with it, else float32",
    )
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    cpu_offload: bool = opt(False, "keep parameters and optimizer state in the host's memory")
    logits_chunk: int = opt(2**25, "logits: tokens × vocabulary at once", at_least=1, at_most=2**40)
    lora: LoRAConfig = sub(LoRAConfig, "low-rank adapters")


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig:
    """The train engine of a model."""

    type: str = named("train_engine", "fsdp", "registered name of the train engine")
    fsdp: FSDPConfig = part(FSDPConfig)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Sharded, atomic checkpoints."""

    every_steps: int = opt(50, "steps between checkpoints; 0: at the end and on Ctrl-C", at_least=0)
    keep: int = opt(2, "number of checkpoints to keep, newest first", at_least=1)
    export: bool = opt(True, "write a Hugging Face folder at the end")
