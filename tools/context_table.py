"""Print the longest row that fits on GPUs, by size of model and number of GPUs, as Markdown.

The numbers are those of `arealite check` for a run with one copy of the model over all GPUs, in
bfloat16, with AdamW and gradient checkpointing. Nothing is downloaded or run.

    python3 tools/context_table.py [--gpu-gb 80]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import Shapes
from arealite.cli import configs
from arealite.ext.machine import estimates
from arealite.ext.models.parallel_options import check_context_parallel

MODELS = {  # Qwen2.5: hidden, layers, intermediate, heads, key heads, vocabulary, tied
    "1.5 B": (1536, 28, 8960, 12, 2, 151936, True),
    "7.6 B": (3584, 28, 18944, 28, 4, 152064, False),
    "32.8 B": (5120, 64, 27648, 40, 8, 152064, False),
    "72.7 B": (8192, 80, 29568, 64, 8, 152064, False),
}
GPUS = 1, 8, 16, 32, 64, 128
CONTEXTS = [1024 << power for power in range(3, 11)]
SHARE = 0.9
"""Share of a GPU's memory that a run may use; the rest is for NCCL, CUDA and fragmentation."""
NAMES = "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"
OPTIONS = "dtype=bfloat16", "gradient_checkpointing=true"
"""Options of `trainer.ppo.engine.fsdp`."""


def config_of(model: tuple[int, ...]) -> dict[str, int]:
    """Return the fields of config.json that the estimate reads."""
    return dict(zip((*NAMES, "num_key_value_heads", "vocab_size"), model[:6], strict=True))


def shapes_of(model: tuple[int, ...]) -> Shapes:
    """Return the shapes of a Qwen2's tensors; all layers in one entry."""
    hidden, layers, inner, heads, kv_heads, vocabulary, tied = model
    kv = hidden // heads * kv_heads
    layer = hidden * (2 * hidden + 2 * kv + 3 * inner) + 3 * hidden + 2 * kv
    return {"layers": [layers, layer], "embedding": [2 - tied, vocabulary, hidden]}


@cache
def base() -> ExperimentConfig:
    """Return the run whose number of ranks and options of the engine change."""
    words = [f"trainer.ppo.engine.fsdp.{option}" for option in OPTIONS]
    return configs.load(ExperimentConfig, configs.CONFIG_DIR / "async_ppo.yaml", words)


def bytes_of(model: tuple[int, ...], ranks: int, size: int, context: int) -> float:
    """Return the estimate for one of `ranks` whose groups of `size` share rows of `context`."""
    config, tokens = base(), context // size
    trainer, ppo = config.trainer, config.trainer.ppo
    fsdp = replace(ppo.engine.fsdp, context_parallel=size, max_tokens_per_microbatch=tokens)
    ppo = replace(ppo, engine=replace(ppo.engine, fsdp=fsdp))
    launcher = replace(config.launcher, trainer_ranks=ranks)
    config = replace(config, trainer=replace(trainer, ppo=ppo), launcher=launcher)
    return next(estimates.memory(config, config_of(model), shapes_of(model))).size


def sizes(model: tuple[int, ...], ranks: int) -> Iterator[int]:
    """Yield the powers of two that `engine.fsdp.context_parallel` can be, smallest first."""
    for size in (1 << power for power in range(8)):
        try:
            check_context_parallel(config_of(model), size=size, ranks=ranks)
            yield size
        except UserError:
            return


def cell(model: tuple[int, ...], ranks: int, limit: float) -> str:
    """Return the longest row that fits, with the smallest context_parallel that is enough."""
    for context in reversed(CONTEXTS):
        for size in sizes(model, ranks):
            if (held := bytes_of(model, ranks, size, context)) <= limit:
                return f"{context // 1024}k ({size}; {held / 1e9:.0f} GB)"
    return "–"


def table(gpu_gb: float) -> str:
    """Return the table in Markdown."""
    lines = [f"| model | {' | '.join(f'{ranks} GPUs' for ranks in GPUS)} |"]
    lines[0] = lines[0].replace(" 1 GPUs", " 1 GPU")
    lines.append("|---" * (len(GPUS) + 1) + "|")
    for name, model in MODELS.items():
        cells = [cell(model, ranks, SHARE * gpu_gb * 1e9) for ranks in GPUS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-gb", type=float, default=80.0)
    print(table(parser.parse_args().gpu_gb))
