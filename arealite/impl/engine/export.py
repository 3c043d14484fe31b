"""Writes the model of an engine as a Hugging Face folder; a collective operation of all ranks."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from arealite.base import log
from arealite.impl.engine import checkpoint, lora
from arealite.impl.engine.hf_folder import copy_small_files, write_config, write_weights

if TYPE_CHECKING:
    from arealite.impl.engine.fsdp import FSDPEngine

logger = log.get(__name__)


def export(engine: FSDPEngine, path: Path) -> None:
    """Write the model in the compute dtype, adapters merged, and `adapter/` for peft."""
    temp = checkpoint.begin(path) if dist.get_rank() == 0 else None
    weights = engine.stream_weights()
    if temp:
        copy_small_files(engine.source, temp)
        write_config(temp, engine.module, dtype=engine.config.dtype, head=engine.head)
        write_weights(temp, weights)
    else:
        deque(weights, maxlen=0)
    if engine.adapter is not None:
        folder = temp / "adapter" if temp else None
        lora.write(engine.module, engine.full, engine.adapter, folder, base=engine.source)
    if temp:
        checkpoint.commit(path, {"world_size": dist.get_world_size(), **checkpoint.versions()})
        logger.info("model exported", path=str(path))
    dist.barrier()
