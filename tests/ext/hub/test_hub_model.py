"""A model path is a folder, or the id of a model of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from arealite.base.errors import UserError
from arealite.ext.hub.hub_model import hub_folder


def test_folder_of_a_model_is_unchanged(tmp_path: Path) -> None:
    assert hub_folder(str(tmp_path)) is None
    assert hub_folder("no/such/folder") is None, "the run reports a missing folder"


def test_misspelled_folder_beside_others_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit").mkdir()
    assert hub_folder("kit/modle") is None, "the run reports a missing folder"


def test_model_of_the_hub_is_its_downloaded_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        assert "*.safetensors" in options["allow_patterns"]
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub_folder("Qwen/Qwen3-0.6B") == Path("/cache/Qwen/Qwen3-0.6B")


def test_model_of_an_unreachable_hub_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(name: str, **options: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"no route to host.*Name a folder, or download the model"):
        hub_folder("Qwen/Qwen3-0.6B")
