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
GOLDEN = -0x61C8864680B583EB
"""The increment of splitmix64: an odd 64-bit constant, as a signed number."""
MIXER = -0x40A7B892E31B1A47
"""A multiplier of splitmix64: an odd 64-bit constant, as a signed number."""


def fingerprint(tensors: Mapping[str, torch.Tensor], device: torch.device) -> str:
    """Return 16 hex digits of all tensors by name, equal on all ranks (hook `fingerprint`).

    They depend on the sharding.

    A chunk's sum is Σ bits[i] · weight[i] mod 2^64 with odd weights, so one flipped bit always
    changes it; sums, names and ranks are then hashed in order.
    """
    chunk_sums = list[torch.Tensor]()
    for name in sorted(tensors):
        chunks = _bits(tensors[name]).split(CHUNK)
        chunk_sums += [_chunk_sum(chunk, device) for chunk in chunks]
    names = "\n".join(sorted(tensors)).encode()
    digest = _digest(_bytes_of(chunk_sums) + names)
    size = dist.get_world_size()
    if size > 1:
        digest_as_int = int.from_bytes(digest, "big", signed=True)
        local_digest = torch.tensor(digest_as_int, device=device)
        digests = [torch.zeros_like(local_digest) for _ in range(size)]
        dist.all_gather(digests, local_digest)
        digest = _digest(_bytes_of(digests))
    return digest.hex()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def _bytes_of(numbers: list[torch.Tensor]) -> bytes:
    """Return the bytes of int64 numbers [] on one device."""
    return torch.stack(numbers).cpu().numpy().tobytes()


def _chunk_sum(chunk: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the weighted sum of a chunk's bits, int64 []."""
    weights = _weights(device)[: len(chunk)]
    return chunk.to(device).long().mul_(weights).sum()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor, or of this rank's shard of it, as integers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    dtypes = {1: torch.int8, 2: torch.int16}
    dtype = dtypes.get(local.element_size(), torch.int32)
    return local.detach().reshape(-1).view(dtype)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd weight for each element of a chunk."""
    mixed = (torch.arange(CHUNK, device=device) + 1) * GOLDEN
    mixed = (mixed ^ (mixed >> 31)) * MIXER
    return (mixed ^ (mixed >> 29)) | 1
