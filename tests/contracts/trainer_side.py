"""Rank 0 of a weight group in its own process, because torch has one group per name in a process.

Reads commands as JSON lines (listen, join, send, leave), answers each with one; see
backends.Trainer.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from arealite.ext.weights.process_group import join

SECONDS = 60.0


def send(group: Any, weights: dict[str, torch.Tensor], names: list[str], *, flat: bool) -> None:
    tensors = [weights[name] for name in names]
    if flat:
        tensors = [torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])]
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)


def main() -> None:
    print(json.dumps("ready"), flush=True)
    group: Any = None
    listener: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        told: Any = "done"
        try:
            if command["do"] == "listen":
                listener = socket.create_server(("127.0.0.1", 0))
                told = listener.getsockname()[1]
            elif command["do"] == "join":
                name = command["name"]
                group = join(listener, name, rank=0, world_size=2, backend="gloo", seconds=SECONDS)
            elif command["do"] == "send":
                weights = load_file(f"{command['folder']}/model.safetensors")
                send(group, weights, command["names"], flat=command["flat"])
            else:
                dist.destroy_process_group(group)
        except (RuntimeError, OSError) as error:
            told = f"{type(error).__name__}: {error}"
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
