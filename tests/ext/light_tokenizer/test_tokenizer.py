"""The light tokenizer has the results of transformers' object, and loads it for everything else."""

from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from arealite.api.agent import load_tokenizer
from arealite.ext.light_tokenizer import light_tokenizer as module
from arealite.ext.light_tokenizer.light_tokenizer import LightTokenizer
from arealite.ext.light_tokenizer.tokenizer_folder import is_compared
from tests.fakes.tokenizer_folders import (
    CORPUS,
    KINDS,
    byte_level,
    gemma,
    qwen,
    random_ids,
    random_texts,
    sentencepiece,
    word_piece,
)

pytestmark = pytest.mark.skipif(
    not is_compared(transformers.__version__), reason="transformers reads all folders"
)
NUM_TEXTS = 2_000
"""Texts for each of the five tokenizers."""
VALUES = (
    "all_special_ids",
    "all_special_tokens",
    "bos_token",
    "bos_token_id",
    "chat_template",
    "eos_token",
    "eos_token_id",
    "extra_special_tokens",
    "is_fast",
    "mask_token_id",
    "name_or_path",
    "pad_token",
    "pad_token_id",
    "sep_token",
    "special_tokens_map",
    "unk_token",
    "unk_token_id",
)
CHAT = [{"role": "user", "content": "Hello"}]


def tool(city: str) -> str:
    """Return the weather.

    Args:
        city: A name.
    """
    return city


def load_both(folder: Path) -> tuple[LightTokenizer, Any]:
    """Return the light tokenizer of a folder, and transformers' object."""
    light = load_tokenizer(str(folder))
    assert type(light) is LightTokenizer
    return light, AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture
def light(tmp_path: Path) -> LightTokenizer:
    return load_tokenizer(str(byte_level(tmp_path / "model")))


@pytest.fixture
def full(light: LightTokenizer) -> Any:
    """The object of transformers for the same folder."""
    return AutoTokenizer.from_pretrained(light.name_or_path)


def assert_equal_tokens(light: LightTokenizer, full: Any, num_texts: int) -> None:
    """Compare texts, ids and values; the light tokenizer handles them alone."""
    full("a")  # turns the truncation and the padding of the file off
    assert light.backend_tokenizer.to_str() == full.backend_tokenizer.to_str()
    assert light.added_tokens_decoder == full.added_tokens_decoder
    for name in VALUES:
        assert getattr(light, name) == getattr(full, name), name
    assert len(light) == len(full)
    rng = random.Random(0)
    tokens = [token.content for token in full.added_tokens_decoder.values()]
    texts = random_texts(rng, num_texts, random.Random(1).sample(tokens, min(50, len(tokens))))
    for add_special_tokens in (True, False):
        rows = light(texts, add_special_tokens=add_special_tokens)
        expected = full(texts, add_special_tokens=add_special_tokens)
        assert rows.data == expected.data
    for text, ids in zip(texts[:50], expected["input_ids"], strict=False):
        assert light.encode(text, add_special_tokens=False) == ids
        assert light(text).data == full(text).data
    sequences = [*expected["input_ids"][:300], *random_ids(rng, 700, len(full))]
    for ids in sequences:
        skips = rng.random() < 0.5
        assert light.decode(ids, skip_special_tokens=skips) == full.decode(ids, skips)
    for cleans in (True, False):
        decoded = [light.decode(x, clean_up_tokenization_spaces=cleans) for x in sequences[:200]]
        assert decoded == full.batch_decode(sequences[:200], clean_up_tokenization_spaces=cleans)
    words = [*tokens[:20], "he", "no such token"]
    assert light.convert_tokens_to_ids(words) == full.convert_tokens_to_ids(words)
    assert light.convert_tokens_to_ids("he") == full.convert_tokens_to_ids("he")
    assert light.full_object is None


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_texts_have_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    light, full = load_both(KINDS[kind](tmp_path / "model"))
    assert_equal_tokens(light, full, NUM_TEXTS)
    full.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_bytes((tmp_path / "model/config.json").read_bytes())
    light, full = load_both(tmp_path / "saved")  # as this version of transformers writes it
    assert_equal_tokens(light, full, 200)


def test_random_texts_tell_tokenizers_apart(tmp_path: Path) -> None:
    light, _ = load_both(byte_level(tmp_path / "model"))
    texts = random_texts(random.Random(0), 500, ["<|eot|>", "<call>"])
    plain = Backend.from_file(str(tmp_path / "model/tokenizer.json"))
    rows = plain.encode_batch(texts, add_special_tokens=False)
    ids = light(texts, add_special_tokens=False)["input_ids"]
    assert ids == [row.ids for row in rows]  # none of the texts has a token of the settings
    plain.no_truncation()
    plain.add_tokens(["he"])
    assert ids != [row.ids for row in plain.encode_batch(texts, add_special_tokens=False)]


def test_worker_starts_without_torch_and_transformers(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model")
    program = """
import sys
import arealite.cli.role, arealite.impl.rollout.worker, arealite.system.links.worker_link
from arealite.api.agent import load_tokenizer
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.rendering import Renderer
from arealite.system.data.templates import decode, render, tokenize
tokenizer = load_tokenizer(sys.argv[1])
chat = [{"role": "user", "content": "Hello"}]
ids = tokenize(tokenizer, chat)
text = "<|start|>user\\nHello<|eot|><|start|>assistant\\n"
assert tokenizer.decode(ids) == decode(tokenizer, ids) == text
assert Renderer(tokenizer, family_of(tokenizer)).render(chat, ()) == render(tokenizer, chat)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# ------------------------------------------------------------ transformers' object


def test_missing_attribute_comes_from_transformers_loaded_once(
    light: LightTokenizer, full: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = list[str]()

    def load(path: str) -> Any:
        paths.append(path)
        return full

    monkeypatch.setattr(module, "load_with_transformers", load)
    assert light.padding_side == "right"
    assert light.tokenize("Hello  world") == full.tokenize("Hello  world")
    assert light.convert_ids_to_tokens([5, 6]) == full.convert_ids_to_tokens([5, 6])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = light.no_such_name
    assert paths == [light.name_or_path]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t("Hello", return_tensors="pt")["input_ids"].tolist(),
        lambda t: t("Hello", "world")["input_ids"],
        lambda t: t(["Hello", "a"], padding=True).data,
        lambda t: t("Hello world", truncation=True, max_length=2).data,
        lambda t: t.encode("Hello world", max_length=2, truncation=True),
        lambda t: t(["a"], ["b"])["input_ids"],
        lambda t: t("Hello world", return_offsets_mapping=True)["offset_mapping"],
        lambda t: t.decode([[5], [6]]),
        lambda t: t.decode({"input_ids": [5]}),
        lambda t: t.batch_decode([[5], [6]]),
        lambda t: t.apply_chat_template([CHAT, CHAT], tokenize=False),
        lambda t: t.apply_chat_template(CHAT, tools=[tool], tokenize=False),
        lambda t: t.apply_chat_template(CHAT, return_tensors="pt")["input_ids"].tolist(),
        lambda t: t.apply_chat_template(CHAT, None, None, "{{ messages }}", tokenize=False),
    ],
)
def test_unsupported_call_has_the_result_of_transformers(
    light: LightTokenizer, full: Any, call: Callable[[Any], Any]
) -> None:
    assert call(light) == call(full)
    assert light.full_object is not None
    assert light.encode("Hello  world") == full.encode("Hello  world")


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.encode(["Hello", "a"]),
        lambda t: t.decode(range(5, 9)),
        lambda t: t.decode(np.array([5, 6])),
        lambda t: t.decode(7),
        lambda t: t.decode(np.int64(7)),
        lambda t: t.decode((5, 6), True),
        lambda t: t("Hello").input_ids,
        lambda t: {**t("Hello")},
        lambda t: ("input_ids" in t("Hello"), "labels" in t("Hello"), [*t("Hello")]),
        lambda t: t("Hello") == {"input_ids": [0]},
        lambda t: t.get_chat_template(),
        lambda t: t.get_chat_template(tools=[]),
        lambda t: t.get_chat_template("tool_use"),
        lambda t: t.get_chat_template("{{ messages }}"),
        lambda t: t.apply_chat_template(CHAT, [{"name": "f"}], tokenize=False),
        lambda t: t.apply_chat_template(CHAT, chat_template="{{ x }}", x=1, tokenize=False),
        lambda t: t.apply_chat_template(CHAT).data,
        lambda t: t.apply_chat_template(CHAT, return_dict=False),
        lambda t: t.get_vocab(),
        lambda t: t.image_token_id,
    ],
)
def test_supported_call_has_the_result_of_transformers_without_it(
    light: LightTokenizer, full: Any, call: Callable[[Any], Any]
) -> None:
    assert call(light) == call(full)
    assert light.full_object is None


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t("Hello world").tokens(),
        lambda t: t("Hello world")[0].offsets,
        lambda t: t("Hello world").char_to_token(3),
        lambda t: t(["Hello", "world"]).word_ids(1),
        lambda t: t(["ab", "cd"]).convert_to_tensors("np")["attention_mask"].tolist(),
    ],
)
def test_result_of_a_call_has_the_methods_of_transformers(
    light: LightTokenizer, full: Any, call: Callable[[Any], Any]
) -> None:
    assert call(light) == call(full)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.encode(None),
        lambda t: t([]),
        lambda t: t.decode([-1]),
        lambda t: t.decode(["a"]),
        lambda t: t.decode([1], no_such_option=1).no_such_attribute,
        lambda t: t.apply_chat_template([]),
        lambda t: t.apply_chat_template(CHAT, tools=["f"]),
        lambda t: t.apply_chat_template(CHAT, chat_template="{{ raise_exception('no') }}"),
        lambda t: "a" in t,
    ],
)
def test_faulty_call_raises_the_error_of_transformers(
    light: LightTokenizer, full: Any, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(Exception) as expected:
        call(full)
    with pytest.raises(type(expected.value)) as raised:
        call(light)
    assert type(raised.value) is type(expected.value)


def test_changed_attribute_holds_for_all_later_calls(light: LightTokenizer) -> None:
    light.pad_token = "<|eot|>"
    assert light.pad_token_id == light.eos_token_id
    light.chat_template = "{{ messages[0].content }}!"
    assert light.apply_chat_template(CHAT, tokenize=False) == "Hello!"
    size = len(light)
    light.add_special_tokens({"additional_special_tokens": ["<late>"]})
    assert len(light) == size + 1
    assert light.encode("<late>", add_special_tokens=False) == [size]
    assert light.decode([size], skip_special_tokens=True) == ""
    assert "<late>" in light.get_vocab()


def test_change_of_the_backend_holds_for_transformers_object(light: LightTokenizer) -> None:
    light.backend_tokenizer.add_tokens(["<late>"])
    assert light.tokenize("<late>") == ["<late>"]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_copy_is_equal(light: LightTokenizer, copied: Callable[[Any], Any], is_full: bool) -> None:
    if is_full:
        light.eos_token = "<pad>"
    other = copied(light)
    text = "".join(CORPUS) + "<|eot|>"
    assert other.encode(text) == light.encode(text)
    assert other.eos_token_id == light.eos_token_id
    assert repr(other) == f"LightTokenizer({light.name_or_path!r})"
    assert (other.full_object is None) is not is_full
    assert hash(other) != hash(light)  # caches know tokenizers by identity


# ------------------------------------------------------------ folders for transformers


def change(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a function that changes values of a JSON file."""

    def write(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text("utf-8")) if file.exists() else {}
        file.write_text(json.dumps(content | values), "utf-8")

    return write


SETTINGS = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("make", "damage"),
    [
        (qwen, change(SETTINGS, add_prefix_space=True, fix_mistral_regex=True)),
        (qwen, change("config.json", model_type="opt")),
        (lambda folder: qwen(folder, is_official=False), lambda _: None),
        (gemma, change(SETTINGS, unk_token="he")),
        (gemma, change(SETTINGS, added_tokens_decoder={"280": {"content": "<late>"}})),
        (word_piece, change(SETTINGS, tokenizer_class="BertTokenizer")),
        (word_piece, change("added_tokens.json", x=3000)),
        (byte_level, change("config.json", model_type="qwen2")),
        (byte_level, change("config.json", model_name="x")),
        (sentencepiece, change("config.json", model_type="llama")),
        (sentencepiece, change("special_tokens_map.json", additional_special_tokens=["<q>"])),
        (sentencepiece, change("tekken.json")),
        (sentencepiece, change(SETTINGS, additional_special_tokens=["<new>"])),
        (sentencepiece, change(SETTINGS, pad_token="he")),
        (byte_level, change(SETTINGS, added_tokens_decoder={"900": {"content": "<late>"}})),
        (byte_level, change(SETTINGS, added_tokens_decoder={"0": {"content": "<bos>"}})),
        (qwen, change(SETTINGS, eos_token="<|eot|>")),
    ],
)
def test_folder_that_transformers_reads_in_another_way_has_its_object(
    make: Callable[[Path], Path], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    damage(folder)
    loaded, expected = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert type(loaded) is type(expected)
    assert loaded.encode("he said") == expected.encode("he said")


def test_folder_with_code_is_left_to_transformers(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model")
    change(SETTINGS, auto_map={"AutoTokenizer": [None, "own.Own"]})(folder)
    assert type(load_tokenizer(str(folder))) is not LightTokenizer


def test_templates_of_files_replace_that_of_the_settings(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    light, full = load_both(folder)
    assert light.chat_template == full.chat_template
    assert light.get_chat_template(tools=[]) == "{{ tools }}"


@pytest.mark.parametrize("version", ["5.17.0", "5.25.0", "6.0.0"])
def test_version_that_was_not_compared_reads_folders_itself(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = byte_level(tmp_path / "model")
    assert type(load_tokenizer(str(folder))) is LightTokenizer
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert type(load_tokenizer(str(folder))) is type(AutoTokenizer.from_pretrained(str(folder)))
