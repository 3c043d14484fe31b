from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.fakes.sglang_program import Program
from tests.models import tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tiny Qwen2 folders of one shape, with different weights."""
    root = tmp_path_factory.mktemp("server-models")
    return [tiny_model(root / f"m{seed}", seed=seed) for seed in range(3)]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a fake Python that has SGLang."""
    return Program(tmp_path)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a config.json and one tensor, for tests that load no model."""
    folder = tmp_path / "model"
    folder.mkdir()
    about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(
        {"model.embed_tokens.weight": np.zeros((64, 4), np.float32)}, folder / "model.safetensors"
    )
    return folder
