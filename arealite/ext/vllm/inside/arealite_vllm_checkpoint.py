"""Compares the tensors of an update with the model folder that a vLLM server started with.

vLLM leaves out missing tensors silently, and a tensor that does not fit breaks the model. So an
update is compared before vLLM touches the model. The module imports neither torch nor vllm.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

HEAD = "lm_head.weight"
"""End of the name of the output head. A model with a tied head reads the embedding in its place."""
DROPPED = (
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
"""Parts of the names of tensors that vLLM drops from every checkpoint."""
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""Types that vLLM casts to the type of the model."""
CODE_OF_DTYPE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Types of tensors in safetensors files by their names in torch."""


class UpdateRefused(ValueError):
    """An update does not fit. The server still has its earlier weights."""


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Describes a tensor without its numbers."""

    shape: tuple[int, ...]
    code: str
    """Type in a safetensors file: F32, BF16, …"""
    file: Path | None = None
    """None: the tensor is not in a file."""


@dataclass(frozen=True, kw_only=True)
class ServedCheckpoint:
    """The tensors that a server needs for a whole update, by their names in the model folder."""

    headers: Mapping[str, TensorHeader]
    is_tied: bool
    """Whether the model reads the embedding in the place of the output head."""

    def is_read(self, name: str) -> bool:
        """Return whether the model reads the tensor; else an update may have it or not."""
        is_tied_head = self.is_tied and name.endswith(HEAD)
        is_dropped = any(part in name for part in DROPPED)
        return not is_tied_head and not is_dropped

    def check(self, headers: Mapping[str, TensorHeader], unused: Collection[str] = ()) -> None:
        """Check the headers of a whole update.

        Args:
            headers: The tensors of the update.
            unused: Names of tensors of the model folder that no model uses.

        Raises:
            UpdateRefused: A tensor is missing, unknown, or of another shape or kind.
        """
        for name, header in headers.items():
            self.check_tensor(name, header)
        for name in sorted(self.headers.keys() - headers.keys() - {*unused}):
            if self.is_read(name):
                shape = [*self.headers[name].shape]
                raise UpdateRefused(f"tensor '{name}' {shape} of the served model is missing")

    def check_tensor(self, name: str, header: TensorHeader) -> None:
        """Check one tensor.

        Raises:
            UpdateRefused: The tensor is unknown, or of another shape or kind.
        """
        shape = [*header.shape]
        served = self.headers.get(name)
        if served is None:
            if self.is_read(name):
                raise UpdateRefused(f"tensor '{name}' {shape} is not in the served model")
            return
        if header.shape != served.shape:
            raise UpdateRefused(
                f"tensor '{name}' has shape {shape}, but {[*served.shape]} in the served model"
            )
        if header.code != served.code and not FLOATS.issuperset((header.code, served.code)):
            raise UpdateRefused(
                f"tensor '{name}' has type {header.code}, but {served.code} in the served model"
            )


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the header of each tensor in the safetensors files of a model folder.

    Raises:
        UpdateRefused: There are no such files, or a file is broken.
    """
    headers = dict[str, TensorHeader]()
    for path in weight_files(folder):
        try:
            if not path.is_file():  # to open a FIFO would block
                raise UpdateRefused(f"{path} is missing or not a regular file")
            with safe_open(path, framework="pt") as file:
                names: list[str] = file.keys()
                for name in names:
                    if name in headers:
                        raise UpdateRefused(f"{folder} has tensor '{name}' twice")
                    tensor = file.get_slice(name)
                    headers[name] = TensorHeader(
                        shape=tuple(tensor.get_shape()),
                        code=tensor.get_dtype(),
                        file=path,
                    )
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise UpdateRefused(f"{path} is not a complete safetensors file: {reason}") from error
    if not headers:
        raise UpdateRefused(f"{folder} has no safetensors files")
    return headers


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers loads from a folder.

    Any exception may be raised if the folder's index is invalid.
    """
    single_file = folder / "model.safetensors"
    if single_file.is_file():
        return [single_file]
    file_of_tensor: dict[str, str] = {}
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():  # to open a FIFO would block
        file_of_tensor = json.loads(index_file.read_text("utf-8"))["weight_map"]
    indexed_files = {folder / name for name in file_of_tensor.values()}
    return sorted(indexed_files or folder.glob("*.safetensors"))
