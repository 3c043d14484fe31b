"""Fingerprint of tensors: a hash that changes with any bit, as fast as reading the memory.

A replay compares it with the run after each step, so the run does not have to store weights.
"""

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

CHUNK = 1 << 18
"""Elements summed at a time; each takes two int64 in memory."""
GOLDEN, MIXER = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Odd 64-bit constants of splitmix64, as signed numbers."""


def fingerprint(tensors: Mapping[str, torch.Tensor], device: torch.device) -> str:
    """Return 16 hex digits of all tensors by name, equal on all ranks; they depend on the sharding.

    A chunk's sum is Σ bits[i] · weight[i] mod 2^64 with odd weights, so one flipped bit always
    changes it; sums, names and ranks are then hashed in order.
    """
    sums = [
        chunk.to(device).long().mul_(_weights(device)[: len(chunk)]).sum()
        for _, tensor in sorted(tensors.items())
        for chunk in _bits(tensor).split(CHUNK)
    ]
    found = torch.stack(sums).cpu().numpy().tobytes()
    mine = hashlib.blake2b(found + "\n".join(sorted(tensors)).encode(), digest_size=8).digest()
    if (size := dist.get_world_size()) > 1:
        number = torch.tensor(int.from_bytes(mine, "big", signed=True), device=device)
        numbers = [torch.zeros_like(number) for _ in range(size)]
        dist.all_gather(numbers, number)
        joined = torch.stack(numbers).cpu().numpy().tobytes()
        mine = hashlib.blake2b(joined, digest_size=8).digest()
    return mine.hex()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kind = {1: torch.int8, 2: torch.int16}.get(local.element_size(), torch.int32)
    return local.detach().reshape(-1).view(kind)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    mixed = (torch.arange(CHUNK, device=device) + 1) * GOLDEN
    mixed = (mixed ^ (mixed >> 31)) * MIXER
    return (mixed ^ (mixed >> 29)) | 1
