"""Reads the tokenizer of a Hugging Face folder as transformers reads it, without importing it.

UnsupportedError refuses a folder that transformers can read in another way. The data of classes:
tokenizer_classes.toml.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from arealite.base.files import read_toml

DATA: dict[str, Any] = read_toml(__file__, "tokenizer_classes.toml")
MISTRAL_SIZE = 100_000
"""Tokens above which transformers looks for a faulty pattern in a tokenizer of Mistral."""


class UnsupportedError(Exception):
    """A folder or a call that only transformers' own object handles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The tokenizer of a folder."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """The text of each named special token, by its name, such as eos_token."""
    extra_special_tokens: list[str]
    chat_template: str | dict[str, str] | None
    """Templates by name if the folder has several."""
    model_input_names: list[str]
    cleans_up: bool
    """Whether decoding removes the spaces before punctuation."""


def read_tokenizer(folder: Path) -> TokenizerParts:
    """Return the tokenizer of a folder.

    Raises:
        UnsupportedError: The folder has no tokenizer.json, or has a fault, or transformers reads it
            with code of the folder, with an unknown class, or with an unknown option; or this
            version of transformers was not compared.
    """
    if not is_compared(importlib.metadata.version("transformers")):
        raise UnsupportedError("this version of transformers was not compared")
    try:
        return _read(folder)
    except Exception as error:  # transformers reports the fault
        raise UnsupportedError(f"{folder}: {error}") from error


def is_compared(version: str) -> bool:
    """Return whether the tests found this version of transformers equal."""
    return version.rpartition(".")[0] in DATA["versions"]


def _read(folder: Path) -> TokenizerParts:
    settings = _read_json(folder / "tokenizer_config.json")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    custom_tokens = {
        name: value for name, value in settings.items() if _is_custom_token(name, value)
    }
    unknown_names = {*settings}.difference(
        DATA["settings"],
        DATA["special_tokens"],
        custom_tokens,
    )
    has_code = not {"auto_map", "model_name"}.isdisjoint(config)
    has_tekken = (folder / "tekken.json").exists()
    if unknown_names or has_code or has_tekken:
        raise UnsupportedError(f"unknown code or settings: {sorted(unknown_names)}")

    backend: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    options = _class_options(settings, config, backend)
    values = options["special_tokens"] | settings
    if backend.padding:
        values.setdefault("pad_token", backend.padding["pad_token"])
    named, extra_texts = _special_tokens(values, custom_tokens)
    special_texts = [*named.values(), *extra_texts]
    _check_tokens(backend, settings, special_texts, folder)
    builds_pipeline = "decoder" in options
    unk_token = named.get("unk_token")
    if builds_pipeline and not _has_pipeline(backend, options, special_texts, unk_token):
        raise UnsupportedError("the class builds another tokenizer")

    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    if backend.post_processor is None:
        backend.post_processor = TemplateProcessing("$A:0", "$A:0 $B:1", [])
    return TokenizerParts(
        backend=backend,
        special_tokens=named,
        extra_special_tokens=extra_texts,
        chat_template=_chat_template(settings, folder),
        model_input_names=settings.get("model_input_names") or ["input_ids", "attention_mask"],
        cleans_up=bool(settings.get("clean_up_tokenization_spaces")),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def _is_custom_token(name: str, value: object) -> bool:
    is_name = name.endswith("_token") and name not in DATA["special_tokens"]
    return is_name and isinstance(value, str)


def _special_tokens(
    values: Mapping[str, Any], custom_tokens: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the named special tokens, by name, and the texts of the others.

    Args:
        values: The settings of the folder and of its class.
        custom_tokens: The special tokens of the settings whose names only the folder has.
    """
    extra_tokens: Any = values.get("extra_special_tokens")
    if not extra_tokens:
        extra_tokens = values.get("additional_special_tokens") or []
    custom = dict(custom_tokens)
    if isinstance(extra_tokens, dict):
        custom |= extra_tokens
        extra_tokens = []
    if not custom:
        custom = values.get("model_specific_special_tokens", {})
    standard = {name: values.get(name) for name in DATA["special_tokens"]}
    tokens = standard | custom
    named = {name: _text(token) for name, token in tokens.items() if token is not None}
    return named, [_text(token) for token in extra_tokens]


def _text(token: Any) -> str:
    """Return the text of a special token of a JSON file."""
    return token if isinstance(token, str) else token["content"]


def _check_tokens(
    backend: Any, settings: Mapping[str, Any], special_texts: list[str], folder: Path
) -> None:
    """Check that transformers adds no token to those of tokenizer.json, and changes none.

    Raises:
        UnsupportedError: The settings have another token, or the same token with other options.
    """
    file_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    saved = settings.get("added_tokens_decoder")
    if saved is not None:
        saved_tokens = {int(index): AddedToken(**token) for index, token in saved.items()}
        has_same_tokens = _reprs(saved_tokens) == _reprs(file_tokens)
    else:
        legacy_files = (
            folder / "special_tokens_map.json",
            folder / "added_tokens.json",
        )
        has_same_tokens = not any(file.exists() for file in legacy_files)
    special = {token.content for token in file_tokens.values() if token.special}
    has_special_tokens = special.issuperset(special_texts)
    if not has_same_tokens or not has_special_tokens:
        raise UnsupportedError("other tokens than those of tokenizer.json")


def _reprs(tokens: Mapping[int, AddedToken]) -> dict[int, str]:
    """Return the text of each token with all its options."""
    return {index: repr(token) for index, token in tokens.items()}


def _class_options(
    settings: Mapping[str, Any], config: Mapping[str, Any], backend: Tokenizer
) -> dict[str, Any]:
    """Return the options of the class with which transformers reads a folder.

    Raises:
        UnsupportedError: The class is not known.
    """
    model_type = config["model_type"]
    declared_name = str(settings.get("tokenizer_class") or config.get("tokenizer_class"))
    name = declared_name.removesuffix("Fast")
    for class_name, options in DATA["classes"].items():
        is_declared = name == class_name and model_type in options["types"]
        if is_declared or model_type in options["forced_types"]:
            return options
    is_llama = name == "LlamaTokenizer" and model_type in DATA["byte_level_types"]
    components = f"{backend.pre_tokenizer!r} {backend.decoder!r}"
    reads_file = (
        model_type in DATA["file_types"]
        or declared_name in DATA["file_classes"]
        or (is_llama and "ByteLevel" in components)
    )
    is_large = backend.get_vocab_size() > MISTRAL_SIZE
    may_be_patched = is_large and model_type in DATA["patched_types"]
    if not reads_file or may_be_patched or model_type in DATA["other_types"]:
        raise UnsupportedError(f"the class of {declared_name} and {model_type}")
    return {"special_tokens": {}}


def _has_pipeline(
    backend: Any, options: Mapping[str, Any], special_texts: list[str], unk_token: str | None
) -> bool:
    """Return whether a tokenizer.json has the pipeline and special tokens that a class builds."""
    if not isinstance(backend.model, BPE):
        return False
    model_options = DATA["model_options"]
    values = {name: getattr(backend.model, name, "") or None for name in model_options}
    expected = {name: options["model"].get(name) for name in model_options}
    if options.get("model_has_unk_token"):
        expected["unk_token"] = unk_token
    if values != expected:
        return False
    if options.get("has_plain_special_tokens"):
        added_tokens = backend.get_added_tokens_decoder()
        added_reprs = {repr(token) for token in added_tokens.values()}
        plain_reprs = {repr(AddedToken(text, special=True)) for text in special_texts}
        if not plain_reprs <= added_reprs:
            return False
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(backend, name)
        if _component(component) != json.loads(options[name]):
            return False
    return True


def _component(component: Any) -> Any:
    """Return the options of a component that change a token or a text."""
    if not component:
        return None
    state = component.__getstate__().decode()
    state = state.replace(',"trim_offsets":true', "")
    state = state.replace(',"trim_offsets":false', "")
    options = json.loads(state)
    is_decoder = "decoders" in type(component).__module__
    if is_decoder and options["type"] == "ByteLevel":
        return {"type": "ByteLevel"}
    return options


def _chat_template(settings: Mapping[str, Any], folder: Path) -> str | dict[str, str] | None:
    """Return the template or templates; files replace those of tokenizer_config.json."""
    additional_files = (folder / "additional_chat_templates").glob("*.jinja")
    files = {file.stem: file for file in additional_files}
    default_file = folder / "chat_template.jinja"
    if default_file.exists():
        files["default"] = default_file
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if [*templates] == ["default"]:
        return templates["default"]
    if templates:
        return templates
    template: Any = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    named_templates = cast(list[dict[str, str]], template)
    return {part["name"]: part["template"] for part in named_templates}
