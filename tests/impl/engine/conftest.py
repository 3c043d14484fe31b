"""One gloo group of one process for a module's tests, and small models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models import tiny_model


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone, with one torch thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2."""
    return tiny_model(tmp_path_factory.mktemp("tied"), init_std=0.1)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with its own head."""
    path = tmp_path_factory.mktemp("untied")
    return tiny_model(path, init_std=0.1, family="llama", tie_word_embeddings=False)
