"""The table of tokenizer classes agrees with the installed transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from arealite.ext.light_tokenizer.tokenizer_folder import (
    DATA,
    UnsupportedError,
    is_compared,
    read_tokenizer,
)
from tests.fakes.tokenizer_folders import gemma, qwen, sentencepiece

pytestmark = pytest.mark.skipif(
    not is_compared(transformers.__version__), reason="transformers reads all folders"
)
CLASSES: dict[str, Any] = DATA["classes"]
NAMES = {"Qwen2Tokenizer": qwen, "GemmaTokenizer": gemma}
DECLARED = [
    (model_type, name)
    for name, options in CLASSES.items()
    for model_type in options["types"] + options["forced_types"]
]
FORCED = [
    (model_type, name, declared)
    for name, options in CLASSES.items()
    for model_type in options["forced_types"]
    for declared in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", None)
]
FILE = [
    (model_type, declared)
    for model_type in DATA["file_types"]
    for declared in ("PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", None)
]
ANY_TYPES = ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt_oss", "bert", "opt", "cohere2"]


def chosen_class(folder: Path, model_type: str, declared: str | None) -> str:
    """Return the class with which transformers reads a folder of this model and name."""
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["tokenizer_class"] = declared
    settings["unk_token"] = "<unk>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    return type(AutoTokenizer.from_pretrained(folder)).__name__


def test_models_are_read_with_the_class_of_the_table(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    for model_type, name in DECLARED:
        assert chosen_class(folder, model_type, name) == name, model_type
    for model_type, name, declared in FORCED:
        assert chosen_class(folder, model_type, declared) == name, (model_type, declared)
    for model_type, declared in FILE:
        assert chosen_class(folder, model_type, declared) == "TokenizersBackend", model_type
    for model_type in DATA["byte_level_types"]:
        assert chosen_class(folder, model_type, "LlamaTokenizerFast") == "TokenizersBackend"
    for model_type in ANY_TYPES:
        for declared in ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"):
            assert chosen_class(folder, model_type, declared) == "TokenizersBackend", model_type


def test_table_has_every_model_whose_own_class_replaces_the_named_one() -> None:
    generic = ("TokenizersBackend", "PreTrainedTokenizerFast", "MistralCommonBackend", None)
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    forced = {
        model_type
        for model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if names.get(model_type) not in generic
    }
    table = {model_type for options in CLASSES.values() for model_type in options["forced_types"]}
    assert forced == table | {*DATA["other_types"]}


@pytest.mark.parametrize("name", CLASSES)
def test_pipeline_of_the_table_is_that_of_the_class(name: str, tmp_path: Path) -> None:
    options = CLASSES[name]
    folder = (gemma if name == "GemmaTokenizer" else qwen)(tmp_path / "model")
    (model_type, *_) = options["types"]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del settings["eos_token" if "eos_token" in settings else "pad_token"]
    settings["tokenizer_class"] = name
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    full: Any = AutoTokenizer.from_pretrained(folder)
    assert type(full).__name__ == name
    full.backend_tokenizer.save(str(folder / "tokenizer.json"))
    parts = read_tokenizer(folder)
    assert parts.backend.to_str() == full.backend_tokenizer.to_str()
    assert parts.special_tokens == full.special_tokens_map


@pytest.mark.parametrize("model_type", ["mistral", "mistral3"])
def test_large_tokenizer_of_mistral_is_left_to_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sentencepiece(tmp_path / "model")
    read_tokenizer(folder)
    monkeypatch.setattr("arealite.ext.light_tokenizer.tokenizer_folder.MISTRAL_SIZE", 100)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    with pytest.raises(UnsupportedError):
        read_tokenizer(folder)
