"""Fingerprint of weights while they are sent: a hash of sums, as fast as reading the memory."""

import hashlib

import torch

CHUNK_BYTES = 8192
"""Bytes that are summed as integers of 64 bits. One changed bit changes the sum."""


class SentWeights:
    """Tensors in the order in which they are sent."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if raw.storage_offset() % 8:  # a part of another tensor
            raw = raw.clone()
        num_summed = len(raw) // CHUNK_BYTES * CHUNK_BYTES
        chunks = raw[:num_summed].view(torch.int64).view(-1, CHUNK_BYTES // 8)
        self._digest.update(f"{name} {[*tensor.shape]} {tensor.dtype}".encode())
        for part in (chunks.sum(-1), raw[num_summed:]):
            self._digest.update(part.cpu().numpy().tobytes())

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all tensors so far."""
        return self._digest.hexdigest()
