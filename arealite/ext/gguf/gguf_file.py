"""GGUF files as models: each is dequantised once, into a model folder in the user's cache.

transformers reads weights, config, tokenizer and template with the packages gguf and accelerate.
This module checks that it has read every tensor, splits texts as the file says (transformers knows
fewer ways), and adds the end of a turn to the generation config.
"""

import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError, one_line
from arealite.base.extras import check_installed, extra_requirement
from arealite.base.files import cache_folder
from arealite.base.printable import fold

PACKAGES = "gguf", "accelerate"
"""Packages with which transformers reads GGUF files."""
FORMAT = 2
"""Version of the folders that this module writes; part of their names."""
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""Matches the end of the name of one file of several."""
EXACT_IN_FLOAT32 = {"F32", "F16"}
"""Tensor types of files that are written in float32. Files with any other type become bfloat16."""
USE_SAFETENSORS = "Use a model folder with safetensors files."
MERGE = "Merge them first: llama-gguf-split --merge FIRST_FILE WHOLE_FILE."
SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}
"""The name in a GGUF file of each named special token."""
USE_TOKENIZER = "Use a model folder with a tokenizer.json."
ROPE_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that change the frequencies of rotary embeddings. transformers drops them."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}",
    "qwen2": rf"{WORDS}|\p{{N}}|{OTHERS}",
}
"""The expression that splits a text before byte-pair encoding, for each of these values of
`tokenizer.ggml.pre`. Source: the file tokenizer.json of Llama 3 and of Qwen 2."""
DIGITS_FIRST = "smollm", "starcoder", "refact", "command-r"
"""Values of `tokenizer.ggml.pre` for which each digit is split from its neighbours, and the rest is
split as in GPT-2."""
BYTE_LEVEL = "gpt-2", "gpt2", "default", ""
"""Values for which texts are split as in GPT-2."""


def is_gguf(path: str) -> bool:
    """Return whether `model.path` is a GGUF file, or a folder that has one and no config.json."""
    place = Path(path).expanduser()
    if place.suffix == ".gguf":
        return True
    return not (place / "config.json").exists() and any(place.glob("*.gguf"))


def convert_model(path: str) -> Path | None:
    """Return the model folder of a GGUF file, and print a line if it is new; None: no GGUF file.

    Raises:
        UserError: See model_folder.
    """
    if not is_gguf(path):
        return None
    folder, line = model_folder(path)
    if line:
        print(fold(line), flush=True)
    return folder


def check_packages(option: str) -> None:
    """Refuse an option that needs to read a GGUF file if a package for it is not installed.

    Raises:
        UserError: A package is not installed.
    """
    for package in PACKAGES:
        check_installed(package, extra_requirement("gguf"), option)


def model_folder(path: str) -> tuple[Path, str]:
    """Return the model folder of a GGUF file, and a line that describes a new folder.

    The folder is below ~/.cache/arealite/gguf, and its name has a hash of the file's content.

    Args:
        path: A GGUF file, or a folder that has one.

    Returns:
        The folder; and the line, or "" if the folder existed.

    Raises:
        UserError: A package is not installed, or the file cannot be converted.
    """
    check_packages(f"model.path={path}")
    file = _find_file(path)
    folder = cache_folder() / "gguf" / f"{file.stem}-{sha256_of(file)[:16]}-v{FORMAT}"
    if folder.exists():
        return folder, ""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        precision = convert(file, scratch)
        os.chmod(scratch, 0o755)
        if not folder.exists():  # another process may have been faster
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder, f"model: {file} was converted to {folder} ({precision})"


def _find_file(path: str) -> Path:
    place = Path(path).expanduser()
    files = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise _refusal(path, f"has several GGUF files ({names})", "Name one of them.")
    file = files[0]
    if not file.is_file():
        raise _refusal(path, "does not exist", "Name a GGUF file or a model folder.")
    if PART.search(file.stem):
        raise _refusal(path, "is one file of several", MERGE)
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise _refusal(path, "is no GGUF file", "Download it again.")
    return file


def _refusal(
    path: Path | str,
    reason: str,
    advice: str = USE_SAFETENSORS,
) -> UserError:
    return UserError(f"model.path={path} {reason}. {advice}")


def convert(file: Path, target: Path) -> str:
    """Write model, tokenizer, chat template and generation config of a GGUF file into a folder.

    Weights are written in bfloat16 if the file has quantised or bfloat16 weights, else in float32.

    Returns:
        The precision of the weights, in words.

    Raises:
        UserError: transformers cannot read the file, or would read another model.
    """
    try:
        with _quiet():
            return _convert(file, target)
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise _refusal(file, f"cannot be read by transformers: {reason}") from error


def _convert(file: Path, target: Path) -> str:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    reader: Any = GGUFReader(file)
    _check_tensors(file, reader)
    auto: Any = AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        output_loading_info=True,
    )
    _check_complete(file, reader, loaded, report["missing_keys"])
    types = {tensor.tensor_type.name for tensor in reader.tensors}
    dtype = torch.float32 if types <= EXACT_IN_FLOAT32 else torch.bfloat16
    model = _without_quantization(loaded)
    rounding = _rounding(model, dtype)
    model.generation_config = _generation_config(loaded.generation_config, reader)
    model.to(dtype).save_pretrained(target)
    _write_tokenizer(file, _make_tokenizer(file, reader), target)
    return f"{_quantisation(reader)}; {str(dtype).removeprefix('torch.')}{rounding}"


def _check_tensors(file: Path, reader: Any) -> None:
    """Raise UserError if transformers drops a tensor of the file."""
    names = [tensor.name for tensor in reader.tensors]
    factors = ", ".join(name for name in names if name in ROPE_FACTORS)
    if factors:
        raise _refusal(
            file,
            f"has factors for its rotary embeddings ({factors}), which transformers drops",
        )


def _check_complete(
    file: Path,
    reader: Any,
    model: Any,
    missing: Any,
) -> None:
    """Raise UserError unless each number of the file is a parameter of the model."""
    state = model.state_dict()
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in state.values()}
    in_file = sum(int(tensor.n_elements) for tensor in reader.tensors)
    in_model = sum(sizes.values())
    if not missing and in_file == in_model:
        return
    num_read = in_model - sum(state[name].numel() for name in missing)
    without = f"without {', '.join(sorted(missing)[:3])}, " if missing else ""
    raise _refusal(
        file,
        f"has {in_file} weights, of which transformers reads {num_read}, "
        f"{without}so the model would be another one",
    )


def _without_quantization(loaded: Any) -> Any:
    """Return the model with a config that save_pretrained accepts."""
    import torch
    from transformers import AutoModelForCausalLM

    options = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "dtype"):
        options.pop(name, None)
    with torch.device("meta"):  # no weights are allocated
        model = AutoModelForCausalLM.from_config(type(loaded.config)(**options))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model


def _rounding(model: Any, dtype: Any) -> str:
    """Return in words how much the weights change when they are rounded to `dtype`.

    This is the root of the mean square of relative changes, with one norm for each tensor.
    """
    import torch

    if dtype == torch.float32:
        return ""
    sum_of_squares = 0.0
    num_weights = 0
    for parameter in model.parameters():
        sum_of_squares += _squared_change(parameter.detach(), dtype) * parameter.numel()
        num_weights += parameter.numel()
    change = (sum_of_squares / num_weights) ** 0.5
    return f", which changes the weights by {change:.2%}"


def _squared_change(weights: Any, dtype: Any) -> float:
    """Return the square of the change of weights, relative to the square of their norm."""
    difference = weights - weights.to(dtype).float()
    change = difference.square().sum() / weights.square().sum()
    return float(change.nan_to_num())  # nan: all weights are 0


def _quantisation(reader: Any) -> str:
    """Return the most frequent tensor type, and the bits of a weight."""
    elements = Counter[str]()
    for tensor in reader.tensors:
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    num_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    bits_per_weight = 8 * num_bytes / elements.total()
    most_frequent, _ = elements.most_common(1)[0]
    return f"{most_frequent}, {bits_per_weight:.1f} bits for a weight"


def _generation_config(config: Any, reader: Any) -> Any:
    """Add the token that ends a turn to the tokens that end a generation."""
    names = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"
    ends = {int(reader.fields[name].contents()) for name in names if name in reader.fields}
    if ends:
        config.eos_token_id = ends.pop() if len(ends) == 1 else sorted(ends)
    return config


def _write_tokenizer(
    file: Path,
    tokenizer: Any,
    target: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(target, save_jinja_files=False)
    written: Any = AutoTokenizer.from_pretrained(target)
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    written_pre_tokenizer = written.backend_tokenizer.pre_tokenizer
    if repr(pre_tokenizer) != repr(written_pre_tokenizer):
        raise UserError(
            f"{type(written).__name__} of transformers splits texts in another way than "
            f"model.path={file}. {USE_TOKENIZER}"
        )


def _text(reader: Any, field: str) -> str:
    return reader.fields[field].contents() if field in reader.fields else ""


def _make_tokenizer(file: Path, reader: Any) -> Any:
    """Return the file's tokenizer, which splits texts as `tokenizer.ggml.pre` says."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for name, key in SPECIAL_TOKENS.items():  # transformers 5.17 takes another token for the end
        field = reader.fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))
    is_byte_level = _text(reader, "tokenizer.ggml.model") == "gpt2"
    if not is_byte_level:  # the vocabulary alone splits texts
        return tokenizer
    pre = _text(reader, "tokenizer.ggml.pre")
    if pre in SPLITS:
        split = Split(Regex(SPLITS[pre]), "isolated")
        steps = [split, ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in DIGITS_FIRST:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif pre in BYTE_LEVEL:
        steps = [ByteLevel(add_prefix_space=False)]
    elif "Split(" in repr(tokenizer.backend_tokenizer.pre_tokenizer):  # transformers knows it
        return tokenizer
    else:
        reason = f"splits texts in the way '{pre}', which is not known"
        raise _refusal(file, reason, USE_TOKENIZER)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    return tokenizer


@contextmanager
def _quiet() -> Generator[None]:
    """Keep progress bars and warnings of transformers from the terminal."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
