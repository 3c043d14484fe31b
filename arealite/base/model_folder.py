"""Read and check a Hugging Face model folder without loading the model.

The module imports no torch and reads only file headers, so a bad folder is found in milliseconds.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import SafetensorError, safe_open

from arealite.base.errors import RoleError, UserError, one_line

LENGTHS = {"embed_tokens.weight": "vocab_size", "layers.0.input_layernorm.weight": "hidden_size"}
"""Maps the end of a tensor's name to the config.json field that its first dimension equals."""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def read_json(folder: Path | str, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a JSON file in a folder; {} if it is missing or invalid."""
    with suppress(OSError, ValueError):
        return json.loads((Path(folder).expanduser() / name).read_text(encoding="utf-8"))
    return {}


def local_folder(path: str | None) -> str | None:
    """Return the folder of `model.path`; a Hugging Face id like Qwen/Qwen3-0.6B is downloaded once.

    A path below an existing folder is no id: kit/modle is a misspelled folder if there is a kit.

    Raises:
        UserError: There is no such folder, and the hub has no such model or cannot be reached.
    """
    if not path or not HUB_ID.fullmatch(path) or Path(path).parent.exists():
        return path
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return hub.snapshot_download(path, allow_patterns=HUB_FILES)
    except (OSError, ValueError) as error:
        why = one_line(error).rstrip(".")
        what = "is no folder here, and no model of the Hugging Face hub that can be read"
        fix = "Name a folder, or download the model where a network is."
        raise UserError(f"model.path={path} {what} ({why:.200}). {fix}") from error


def has_chat_template(folder: Path | str) -> bool:
    """Return whether the tokenizer in a folder has a chat template."""
    is_file = (Path(folder).expanduser() / "chat_template.jinja").is_file()
    return is_file or bool(read_json(folder, "tokenizer_config.json").get("chat_template"))


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers loads from a folder."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index: dict[str, str] = read_json(folder, "model.safetensors.index.json").get("weight_map", {})
    return sorted({folder / name for name in index.values()} or folder.glob("*.safetensors"))


Shapes = Mapping[str, list[int]]
"""The shape of each tensor by name."""


class Header(NamedTuple):
    """Describes a tensor in a file."""

    file: Path
    shape: list[int]
    dtype: str
    """As safetensors names it: F32, BF16, …"""


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the header of every tensor in a Hugging Face folder; {} without safetensors files.

    Raises:
        RoleError: A file is broken or missing.
    """
    headers = dict[str, Header]()
    opened = cast(Any, safe_open)
    for path in weight_files(folder):
        try:
            with opened(path, framework="numpy") as file:
                for name in cast(list[str], file.keys()):
                    if name in headers:
                        raise RoleError(f"{path} and {headers[name].file.name} both have {name}")
                    part = file.get_slice(name)
                    headers[name] = Header(path, part.get_shape(), part.get_dtype())
        except (OSError, SafetensorError) as error:
            what = "is no safetensors file" if path.exists() else "is missing"
            raise RoleError(f"{path} {what}: {one_line(error)}") from error
    return headers


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a Hugging Face folder; see read_headers."""
    return {name: header.shape for name, header in read_headers(folder).items()}


def check_shapes(
    sent: Shapes, expected: Shapes, *, where: object, whole: bool = True, unused: Iterable[str] = ()
) -> None:
    """Check the names and shapes of tensors before they are sent to a server.

    SGLang answers 200 to a tensor with a wrong shape or an unknown name, and then generates from
    broken weights.

    Args:
        sent: Shapes of the trainer's tensors.
        expected: Shapes of the tensors to be replaced; {} if unknown.
        where: The owner of `expected`, for the error.
        whole: Whether an expected tensor that is not sent is an error. The output head may be tied
            to the embedding.
        unused: Expected tensors that no model uses.

    Raises:
        RoleError: A tensor does not match. The message has its name and both shapes.
    """
    if not expected:
        return
    for name, shape in sent.items():
        if name not in expected:
            raise RoleError(f"tensor '{name}' {list(shape)} of the trainer is not in {where}")
        if list(shape) != list(expected[name]):
            what = f"tensor '{name}' has shape {list(shape)} in the trainer"
            raise RoleError(f"{what}, but {expected[name]} in {where}")
    for name in sorted(expected.keys() - {*sent, *unused}) if whole else ():
        if not name.endswith(("lm_head.weight", ".inv_freq")):
            raise RoleError(f"tensor '{name}' {expected[name]} of {where} is not in the trainer")


def read_model(path: str, key: str = "model.path") -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Check the files of the model folder that option `key` names.

    Returns:
        Its config.json, and the shape of each tensor by name.

    Raises:
        UserError: A file is missing, broken, or does not match config.json.
    """
    folder = Path(path).expanduser()
    for name in "config.json", "*.safetensors":
        if not any(folder.glob(name)):
            what = f"{key}={path} is no Hugging Face model folder (no {name} in it)"
            fix = "Use a folder that save_pretrained wrote or that you downloaded."
            raise UserError(f"{what}. {fix}")
    index = "model.safetensors.index.json"
    files = [file.name for file in folder.glob("*.safetensors")]
    if "model.safetensors" not in files and not read_json(folder, index).get("weight_map"):
        what = f"{key}={path} has neither model.safetensors nor a {index} with a weight_map"
        raise UserError(f"{what}. Download {index} again, or use save_pretrained.")
    try:
        config: dict[str, Any] = dict(json.loads((folder / "config.json").read_text()))
        shapes = read_shapes(folder)
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}={path}: config.json is not valid JSON: {error}") from error
    except RoleError as error:
        raise UserError(f"{key}={path}: {error}. Download the whole file again.") from error
    for name, shape in shapes.items() if "text_config" not in config else ():
        field = next((LENGTHS[end] for end in LENGTHS if name.endswith(end)), "")
        if config.get(field) not in (None, *shape[:1]):
            what = f"{name} has shape {shape}, but config.json has {field}={config[field]!r}"
            raise UserError(f"{key}={path}: {what}. The files are of different models.")
    vocab: Any = read_json(folder, "tokenizer.json").get("model", {}).get("vocab") or [0]
    size = vocab_size(config)
    ids = getattr(vocab, "values", lambda: [len(vocab) - 1])
    if size and (top := max(ids())) >= size:
        what = f"{key}={path}: its tokenizer has token {top}, but its model only {size} tokens"
        raise UserError(f"{what}. Use the tokenizer that the model was trained with.")
    return config, shapes


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the text model."""
    return config.get("text_config") or config


def check_layers(config: dict[str, Any], path: Path | str) -> None:
    """Raise UserError for a model that generates no text from text alone, or is quantized."""
    if config.get("quantization_config"):
        fix = "Use weights in bfloat16, and a config.json without quantization_config."
        raise UserError(f"model.path={path} is quantized, which cannot be trained. {fix}")
    kind = config.get("model_type", "(none)")
    names = config.get("architectures") or [""]
    known = causal_types()
    if config.get("is_encoder_decoder") or any(name.endswith(ENCODERS) for name in names):
        what = f"a {names[0] or kind}, which cannot continue a text"
    elif known and kind not in known:
        what = f"of type '{kind}', which this version of transformers does not know as a text model"
    elif kind in WITH_IMAGES and "vision_config" in config:
        what = f"of type '{kind}' with tensors for images, which are not supported"
    else:
        return
    raise UserError(f"model.path={path} is {what}. Use a model for causal language modelling.")


ENCODERS = "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering"
"""Ends of the names of architectures without a head for causal language modelling."""
WITH_IMAGES = "llama4", "mllama"
"""Model types of which transformers cannot load the text part alone."""
CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = "


def causal_types() -> set[str]:
    """Return the model types that transformers loads with AutoModelForCausalLM; {}: unknown.

    They are read from its source, because an import takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    file = Path(spec.origin or "").parent / "models/auto/modeling_auto.py" if spec else Path()
    with suppress(OSError):
        _, found, rest = file.read_text(encoding="utf-8").partition(CAUSAL)
        return set(re.findall(r'\("([\w-]+)",', rest.partition("]\n)")[0])) if found else set()
    return set()


def check_context_parallel(config: dict[str, Any], *, size: int, ranks: int) -> None:
    """Raise UserError unless groups of `size` of the `ranks` can share the tokens of a row."""
    key = f"engine.fsdp.context_parallel={size}"
    text = text_part(config)
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    layers: list[str] = text.get("layer_types") or []
    other = {*layers} - known
    if size > 1 and other:
        what = f"the model has layers of {', '.join(sorted(other))}"
        raise UserError(f"{key}: {what}, whose tokens depend on each other. Use 1.")
    if size > 1 and text.get("output_router_logits"):
        raise UserError(f"{key}: the loss of output_router_logits needs whole rows. Use 1.")
    heads = text.get("num_attention_heads") or size
    for number, what in (ranks, "trainer ranks"), (heads, "attention heads of the model"):
        if number % size:
            raise UserError(f"{key} does not divide the {number} {what}. Use a divisor.")


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
        what = f"{key}={path} has {theirs} token ids, but model.path has {ours}"
        raise UserError(f"{what}. Use a model with the same vocabulary.")


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def model_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return an error if a server's model differs from model.path, else None.

    Args:
        theirs: Fields that the server reports of its config.json; may be incomplete.
        ours: config.json of model.path.
    """
    theirs, ours = ({**each, "vocab_size": vocab_size(each)} for each in (theirs, ours))
    for key in ("architectures", "model_type", *SIZES):
        if theirs.get(key) not in (None, []) and theirs[key] != ours.get(key):
            had = f"its {key} is {theirs[key]}, model.path has {ours.get(key)}"
            return f"it serves another model: {had}."
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


def experts_of(config: dict[str, Any]) -> Experts | None:
    """Return the numbers of experts in a config.json; None if the model has no experts."""
    text = text_part(config)
    counts = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    active = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"
    count, per_token = (next(filter(None, map(text.get, n)), None) for n in (counts, active))
    layers = text.get("num_hidden_layers") or len(text.get("layers_block_type") or [])
    is_known = all(isinstance(each, int) for each in (layers, count, per_token))
    return Experts(layers, count, per_token) if is_known and count > 1 else None  # type: ignore


def vocab_size(config: dict[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json; None if it has none."""
    return text_part(config).get("vocab_size") or config.get("vocab_size")


def exact_length(config: dict[str, Any]) -> int | None:
    """Return the longest row whose positions are independent of other rows; None: no limit.

    Rotary embeddings of types dynamic and longrope depend on the longest row of a batch.
    """
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("dynamic", "longrope"):
        return None
    names = "original_max_position_embeddings", "max_position_embeddings"
    return next((each[name] for name in names for each in (rope, config) if each.get(name)), None)


def eos_tokens(path: str) -> set[int]:
    """Return the EOS token ids of the model in a folder."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(path, name).get("eos_token_id")
        if eos is not None:
            return {eos} if isinstance(eos, int) else set(eos)
    return set()
