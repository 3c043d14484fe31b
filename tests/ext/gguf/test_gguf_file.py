"""GGUF files become model folders once; nothing of the model is lost in silence."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.ext.gguf import gguf_file
from arealite.ext.light_tokenizer.light_tokenizer import LightTokenizer
from arealite.ext.light_tokenizer.tokenizer_folder import is_compared
from tests.fakes.gguf_files import MERGED, Content, write_gguf
from tests.models import tiny_model

TEXT = "It's 12 ab3, I'LL see\n\n  über 4567"
GPT2 = ["It", "'s", " 12", " ab", "3", ",", " I", "'", "LL", " see", "\n\n ", " über", " 4567"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder that no test changes. Its class of tokenizer keeps any way to split."""
    return tiny_model(tmp_path_factory.mktemp("gguf") / "model", family="llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/arealite/gguf"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.state_dict()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_tokens_and_template_are_those_of_the_model(
    tmp_path: Path, cache: Path, family: str, is_tied: bool
) -> None:
    original = tiny_model(tmp_path / "model", family=family, tie_word_embeddings=is_tied)
    made, line = gguf_file.model_folder(str(write_gguf(original, tmp_path / "a.gguf")))
    assert made.parent == cache
    assert line.endswith(f"was converted to {made} (F32, 32.0 bits for a weight; float32)")
    ours, theirs = weights_of(made), weights_of(original)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    expected: Any = AutoTokenizer.from_pretrained(original)
    tokens = expected.convert_ids_to_tokens(range(63))
    assert tokenizer.convert_ids_to_tokens(range(64)) == [*tokens, MERGED]
    assert tokenizer.chat_template == expected.chat_template
    ends = "pad_token_id", "bos_token_id", "eos_token_id"
    assert [getattr(tokenizer, name) for name in ends] == [0, 1, 2]
    settings = json.loads((made / "generation_config.json").read_text())
    assert [settings[name] for name in ends] == [0, 1, 2]
    # Qwen2's class adds a token that the file does not have.
    if family == "llama" and is_compared(transformers.__version__):
        assert isinstance(load_tokenizer(str(made)), LightTokenizer), "workers need no transformers"


@pytest.mark.parametrize("quantisation", ["Q8_0", "BF16"])
def test_rounding_of_the_weights_is_said(folder: Path, tmp_path: Path, quantisation: str) -> None:
    file = write_gguf(folder, tmp_path / "a.gguf", Content(quantisation=quantisation))
    made, line = gguf_file.model_folder(str(file))
    change = {"Q8_0": r"0\.[01]\d%", "BF16": r"0\.00%"}[quantisation]
    bits = {"Q8_0": "8.7", "BF16": "16.1"}[quantisation]
    precision = rf"{quantisation}, {bits} bits for a weight; bfloat16, which changes the weights by"
    assert re.search(rf"\({precision} {change}\)$", line), line
    ours, theirs = weights_of(made), weights_of(folder)
    for name, weights in theirs.items():
        assert ours[name].dtype == torch.bfloat16
        assert torch.allclose(ours[name].float(), weights, rtol=0.01, atol=0.01), name


def test_file_is_converted_once_for_its_content(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(folder, tmp_path / "a.gguf")
    shutil.copy(file, tmp_path / "kept.gguf")
    first, _ = gguf_file.model_folder(str(file))
    write_gguf(tiny_model(tmp_path / "other", seed=1), file)
    other, line = gguf_file.model_folder(str(file))
    assert other != first
    assert line
    monkeypatch.setattr(gguf_file, "convert", None)
    shutil.copy(tmp_path / "kept.gguf", file)
    assert gguf_file.model_folder(str(file)) == (first, "")


def test_commands_take_a_file_or_its_folder(
    folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kit").mkdir()
    file = write_gguf(folder, tmp_path / "kit/a.gguf")
    lines = list[str]()
    for path in (str(file), str(file.parent), str(folder)):
        config = replace(ExperimentConfig(), model=ModelConfig(path=path))
        found = configs.with_model(config).model.path
        lines.append(capsys.readouterr().out)
        assert found == (path if path == str(folder) else str(next(cache.iterdir())))
    assert lines[0].startswith(f"model: {file} was converted to {cache}")
    assert lines[1:] == ["", ""]


def test_end_of_a_turn_ends_a_generation(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "a.gguf", Content(eot_token=7))
    made, _ = gguf_file.model_folder(str(file))
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    {
        "gpt-2": GPT2,
        None: GPT2,
        "smollm": [
            *("It", "'s", " ", "1", "2", " ab", "3", ",", " I", "'", "LL", " see"),
            *("\n\n ", " über", " ", "4", "5", "6", "7"),
        ],
        "qwen2": [
            *("It", "'s", " ", "1", "2", " ab", "3", ",", " I", "'LL", " see"),
            *("\n\n", " ", " über", " ", "4", "5", "6", "7"),
        ],
        "llama-bpe": [
            *("It", "'s", " ", "12", " ab", "3", ",", " I", "'LL", " see"),
            *("\n\n", " ", " über", " ", "456", "7"),
        ],
    }.items(),
)
def test_texts_are_split_as_the_file_says_after_a_reload(
    folder: Path, tmp_path: Path, pre: str | None, pieces: list[str]
) -> None:
    made, _ = gguf_file.model_folder(str(write_gguf(folder, tmp_path / "a.gguf", Content(pre=pre))))
    assert load_tokenizer(str(made)).encode("") == []
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    spans = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in spans] == pieces


@pytest.mark.parametrize(
    ("content", "error"),
    {
        "unknown split": (Content(pre="klingon"), "way 'klingon', which is not known.*tokenizer.j"),
        "rope factors": (Content(extra=["rope_freqs.weight"]), "rotary embeddings .rope_freqs"),
        "missing tensor": (
            Content(without=["blk.0.ffn_up.weight"]),
            r"reads \d+, without model.layers.0.mlp.up_proj.weight, so the model would be another",
        ),
        "unread tensor": (
            Content(extra=["blk.0.attn_sinks.weight"]),
            r"has \d+ weights, of which transformers reads \d+, so",
        ),
        "unknown architecture": (Content(architecture="gptj"), "architecture gptj is not support"),
    }.values(),
)
def test_model_that_would_differ_is_refused(
    folder: Path, tmp_path: Path, cache: Path, content: Content, error: str
) -> None:
    file = write_gguf(folder, tmp_path / "a.gguf", content)
    with pytest.raises(UserError, match=rf"model\.path={file}.*{error}"):
        gguf_file.model_folder(str(file))
    assert not [*cache.iterdir()]


def test_way_of_splitting_that_the_class_of_the_tokenizer_does_not_keep_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    qwen2 = tiny_model(tmp_path / "model", family="qwen2")
    file = write_gguf(qwen2, tmp_path / "a.gguf", Content(pre="smollm"))
    with pytest.raises(UserError, match="Qwen2Tokenizer of transformers splits texts in another"):
        gguf_file.model_folder(str(file))
    assert not [*cache.iterdir()]


def test_bad_files_are_refused_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    (tmp_path / "x-00001-of-00003.gguf").touch()
    (tmp_path / "html.gguf").write_text("<html>")
    for name, error in [
        ("two", r"several GGUF files \(a\.gguf, b\.gguf\)\. Name one"),
        ("x-00001-of-00003.gguf", r"one file of several\. Merge them first: llama-gguf-split"),
        ("html.gguf", r"is no GGUF file\. Download it again"),
        ("none.gguf", r"does not exist\. Name a GGUF file or a model folder"),
    ]:
        with pytest.raises(UserError, match=error):
            gguf_file.model_folder(str(tmp_path / name))
    assert not cache.exists()


def test_cut_off_file_is_refused(folder: Path, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(folder, tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"a\.gguf cannot be read by transformers: ValueError: "):
        gguf_file.model_folder(str(file))
    assert not [*cache.iterdir()]


def test_missing_package_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "PACKAGES", ("gguf", "no_such_package"))
    with pytest.raises(UserError, match=r"needs the package no_such_package.*\[gguf\]"):
        gguf_file.model_folder(str(tmp_path / "a.gguf"))
