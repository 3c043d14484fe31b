"""Read and check a Hugging Face model folder without loading the model.

The module imports no torch and reads only file headers, so a bad folder is found in milliseconds.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import SafetensorError, safe_open

from arealite.base.errors import RoleError, UserError, one_line

LENGTHS = {"embed_tokens.weight": "vocab_size", "layers.0.input_layernorm.weight": "hidden_size"}
"""Maps the end of a tensor's name to the config.json field that its first dimension equals."""
OPTIONAL = ("lm_head.weight", ".inv_freq")
"""Ends of the names of tensors that a model may lack: the head may be tied to the embedding."""


def read_json(folder: Path | str, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a JSON file in a folder; {} if it is missing or invalid."""
    with suppress(OSError, ValueError):
        file = Path(folder).expanduser() / name
        if file.is_file():  # to open a FIFO would block
            return json.loads(file.read_text(encoding="utf-8"))
    return {}


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers loads from a folder."""
    single_file = folder / "model.safetensors"
    if single_file.is_file():
        return [single_file]
    index = read_json(folder, "model.safetensors.index.json")
    file_of_tensor: dict[str, str] = index.get("weight_map", {})
    indexed_files = {folder / name for name in file_of_tensor.values()}
    return sorted(indexed_files or folder.glob("*.safetensors"))


Shapes = Mapping[str, list[int]]
"""The shape of each tensor by name."""


class Header(NamedTuple):
    """Describes a tensor in a file."""

    file: Path
    shape: list[int]
    dtype: str
    """As safetensors names it: F32, BF16, …"""


@dataclass(frozen=True, kw_only=True)
class ModelTensors:
    """The tensors that a model has. Other tensors are compared with them before they are sent.

    SGLang answers 200 to a tensor with a wrong shape or an unknown name, and then generates from
    broken weights.
    """

    shapes: Shapes
    """{}: unknown, so all tensors match."""
    owner: object
    """Where the model is, for errors."""
    unused: Collection[str] = ()
    """Names of tensors that no model uses."""

    def mismatch(self, name: str, shape: list[int]) -> str:
        """Return how a tensor differs from the model's tensor of this name; "" if it does not."""
        expected_shape = self.shapes.get(name)
        if not self.shapes or shape == expected_shape:
            return ""
        if expected_shape is None:
            return f"tensor '{name}' {shape} is not in {self.owner}"
        return f"tensor '{name}' has shape {shape}, but {expected_shape} in {self.owner}"

    def difference(self, shapes: Shapes) -> str:
        """Return how the tensors of a whole model differ from these; "" if they do not."""
        for name, shape in shapes.items():
            mismatch = self.mismatch(name, shape)
            if mismatch:
                return mismatch
        for name in sorted(self.shapes.keys() - {*shapes, *self.unused}):
            if not name.endswith(OPTIONAL):
                return f"tensor '{name}' {self.shapes[name]} of {self.owner} is missing"
        return ""


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the header of every tensor in a Hugging Face folder; {} without safetensors files.

    Raises:
        RoleError: A file is broken or missing.
    """
    headers = dict[str, Header]()
    opened = cast(Any, safe_open)
    for path in weight_files(folder):
        if not path.is_file():  # to open a FIFO would block
            raise RoleError(f"{path} is missing or not a regular file")
        try:
            with opened(path, framework="numpy") as file:
                for name in cast(list[str], file.keys()):
                    if name in headers:
                        raise RoleError(f"{path} and {headers[name].file.name} both have {name}")
                    tensor = file.get_slice(name)
                    headers[name] = Header(path, tensor.get_shape(), tensor.get_dtype())
        except (OSError, SafetensorError) as error:
            raise RoleError(f"{path} is no safetensors file: {one_line(error)}") from error
    return headers


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a Hugging Face folder; see read_headers."""
    return {name: header.shape for name, header in read_headers(folder).items()}


def read_model(path: str, key: str = "model.path") -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Check the files of the model folder that option `key` names.

    Returns:
        Its config.json, and the shape of each tensor by name.

    Raises:
        UserError: A file is missing, broken, or does not match config.json.
    """
    option = f"{key}={path}"
    folder = Path(path).expanduser()
    _check_files(folder, option)
    try:
        config_text = (folder / "config.json").read_text()
        config: dict[str, Any] = dict(json.loads(config_text))
        shapes = read_shapes(folder)
    except (ValueError, TypeError) as error:
        raise UserError(f"{option}: config.json is not valid JSON: {error}") from error
    except RoleError as error:
        raise UserError(f"{option}: {error}. Download the whole file again.") from error
    if "text_config" not in config:
        _check_lengths(config, shapes, option)
    num_tokens = vocab_size(config)
    largest_token = _largest_token(folder)
    if num_tokens and largest_token >= num_tokens:
        raise UserError(
            f"{option}: its tokenizer has token {largest_token}, "
            f"but its model only {num_tokens} tokens. "
            "Use the tokenizer that the model was trained with."
        )
    return config, shapes


def _check_files(folder: Path, option: str) -> None:
    """Raise UserError if a model folder lacks a file that transformers needs."""
    for name in "config.json", "*.safetensors":
        if not any(folder.glob(name)):
            raise UserError(
                f"{option} is no Hugging Face model folder (no {name} in it). "
                "Use a folder that save_pretrained wrote or that you downloaded."
            )
    index = "model.safetensors.index.json"
    single_file = folder / "model.safetensors"
    has_single_file = single_file.exists() or single_file.is_symlink()  # its target may be missing
    if not has_single_file and not read_json(folder, index).get("weight_map"):
        raise UserError(
            f"{option} has neither model.safetensors nor a {index} with a weight_map. "
            f"Download {index} again, or use save_pretrained."
        )


def _check_lengths(config: dict[str, Any], shapes: Shapes, option: str) -> None:
    """Raise UserError if the first dimension of a tensor differs from its field of config.json."""
    for name, shape in shapes.items():
        fields = [field for end, field in LENGTHS.items() if name.endswith(end)]
        if not fields:
            continue
        field = fields[0]
        if config.get(field) not in (None, *shape[:1]):
            raise UserError(
                f"{option}: {name} has shape {shape}, "
                f"but config.json has {field}={config[field]!r}. "
                "The files are of different models."
            )


def _largest_token(folder: Path) -> int:
    """Return the largest token id of a tokenizer.json; 0 without one."""
    tokenizer = read_json(folder, "tokenizer.json")
    vocabulary: Any = tokenizer.get("model", {}).get("vocab") or [0]
    if isinstance(vocabulary, dict):
        return max(cast(dict[str, int], vocabulary).values())
    return len(vocabulary) - 1


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the text model."""
    return config.get("text_config") or config


def check_vocabulary(path: str | None, model: dict[str, Any], *, key: str) -> None:
    """Raise UserError if two models have vocabularies of different size.

    Args:
        path: Folder of the other model; None and "initial": there is none.
        model: config.json of the trained model.
        key: The option that sets `path`, for the error.
    """
    if path is None or path == "initial":
        return
    theirs = vocab_size(read_model(path, key)[0])
    ours = vocab_size(model)
    if theirs != ours:
        raise UserError(
            f"{key}={path} has {theirs} token ids, but model.path has {ours}. "
            "Use a model with the same vocabulary."
        )


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def model_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return an error if a server's model differs from model.path, else None.

    Args:
        theirs: Fields that the server reports of its config.json; may be incomplete.
        ours: config.json of model.path.
    """
    theirs = {**theirs, "vocab_size": vocab_size(theirs)}
    ours = {**ours, "vocab_size": vocab_size(ours)}
    for key in ("architectures", "model_type", *SIZES):
        is_reported = theirs.get(key) not in (None, [])
        if is_reported and theirs[key] != ours.get(key):
            return (
                f"it serves another model: its {key} is {theirs[key]}, "
                f"model.path has {ours.get(key)}."
            )
    return None


class Experts(NamedTuple):
    """The numbers of a mixture of experts, which determine the size of a routing record."""

    layers: int
    """Decoder layers, including those without experts."""
    number: int
    """Experts of a layer."""
    per_token: int

    @property
    def width(self) -> int:
        """Bytes of an expert's number: 1 for at most 255 experts, as 255 means no record."""
        return 1 if self.number < 256 else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of the record of one token."""
        return self.layers * self.per_token * self.width


EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json with the number of experts; each model has one of them."""
ACTIVE_EXPERT_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Fields of config.json with the number of experts that compute a token."""


def experts_of(config: dict[str, Any]) -> Experts | None:
    """Return the numbers of experts in a config.json; None if the model has no experts."""
    text_model = text_part(config)
    number = _first_number(text_model, EXPERT_FIELDS)
    per_token = _first_number(text_model, ACTIVE_EXPERT_FIELDS)
    layers: Any = text_model.get("num_hidden_layers")
    if not layers:
        layers = len(text_model.get("layers_block_type") or [])
    if number is None or per_token is None or not isinstance(layers, int) or number < 2:
        return None
    return Experts(layers=layers, number=number, per_token=per_token)


def _first_number(config: dict[str, Any], names: Sequence[str]) -> int | None:
    """Return the first field that is set, if it is an integer; otherwise None."""
    for name in names:
        number = config.get(name)
        if number:
            return number if isinstance(number, int) else None
    return None


def vocab_size(config: dict[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json; None if it has none."""
    return text_part(config).get("vocab_size") or config.get("vocab_size")


def exact_length(config: dict[str, Any]) -> int | None:
    """Return the longest row whose positions are independent of other rows; None: no limit.

    Rotary embeddings of types dynamic and longrope depend on the longest row of a batch.
    """
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type not in ("dynamic", "longrope"):
        return None
    for name in "original_max_position_embeddings", "max_position_embeddings":
        for options in (rope, config):
            if options.get(name):
                return options[name]
    return None


def eos_tokens(path: str) -> set[int]:
    """Return the EOS token ids of the model in a folder."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(path, name).get("eos_token_id")
        if eos is not None:
            return {eos} if isinstance(eos, int) else set(eos)
    return set()
