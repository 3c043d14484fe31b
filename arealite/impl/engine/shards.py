"""The shards of a model and its optimizer in a folder, written and read by all ranks together."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from arealite.base.errors import UserError
from arealite.impl.engine.lora import state_tensors
from arealite.impl.engine.optimizer import Optimizer


def save(folder: Path, module: nn.Module, optimizer: Optimizer, extra: dict[str, object]) -> None:
    """Write the tensors that training changes, and `extra`, into `folder`."""
    save_state(_live_state(module, optimizer), checkpoint_id=folder / "state")
    if dist.get_rank() == 0:
        inside = {"updates": optimizer.updates, "extra": extra}
        (folder / "extra.json").write_text(json.dumps(inside))


def load(folder: Path, module: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """Read what `save` wrote, at any number of ranks; return `extra`.

    Raises:
        UserError: the folder is of other parameters or another optimizer.
    """
    state = _live_state(module, optimizer)
    stored = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
    names = (f"{part}.{name}" for part, tensors in state.items() for name in tensors)
    if absent := next((name for name in names if name not in stored), None):
        what = "use the model, engine.fsdp.lora and optimizer.type that it was written with"
        fix = f"{what}, or start a new run with resume=never."
        raise UserError(f"Checkpoint '{folder}' has no '{absent}': {fix}")
    load_state(state, checkpoint_id=folder / "state")
    inside = json.loads((folder / "extra.json").read_text())
    optimizer.updates = inside["updates"]
    return inside["extra"]


def _live_state(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that training changes, to save them or to load into them."""
    model = {
        name: tensor.detach()
        for name, tensor in state_tensors(module)
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }
    return {"model": model, "optimizer": optimizer.state()}
