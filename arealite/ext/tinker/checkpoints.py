"""Checkpoints of a tenant: folders whose paths the client sees as tinker://MODEL/KIND/NAME.

`weights` can be trained further; `sampler_weights` are for sampling; `snapshots` are those of a
sampling client without a name, of which a model keeps the last ones. Each folder has the adapter as
peft writes it, and `checkpoint.json`. A folder gets its name when it is complete.
"""

import shutil
import time
from pathlib import Path

import msgspec

from arealite.base.errors import UserError
from arealite.base.folder_checks import check_name

PREFIX = "tinker://"
TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""The type of a checkpoint in lists, by the kind in its path."""
SNAPSHOTS = "snapshots"
KINDS = (*TYPES, SNAPSHOTS)
FILE = "checkpoint.json"
ADAPTER = "adapter"
"""Folder of the adapter, in the folder of a checkpoint."""
STATE = "state"
"""Folder of the adapter and its optimizer there, in `weights`."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The base model and the adapter of a model."""

    base_model: str
    rank: int
    train_mlp: bool
    train_attn: bool


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`."""

    path: str
    spec: ModelSpec
    created: float
    """Seconds since 1970."""
    user_metadata: dict[str, str] | None = None
    size_bytes: int = 0

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return self.path.removeprefix(PREFIX).split("/")[1]


class Checkpoints:
    """The checkpoints of one tenant."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, path: str, *, overwrite: bool) -> Path:
        """Return an empty folder, which `commit` makes the checkpoint of this path.

        Raises:
            UserError: The path is wrong, or there is a checkpoint already.
        """
        folder = self.folder(path)
        if folder.exists() and not overwrite:
            raise UserError(f"{path} exists already. Use another name, or overwrite=True.")
        unfinished = _unfinished(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def commit(self, checkpoint: Checkpoint) -> None:
        """Complete a checkpoint whose files are written."""
        folder = self.folder(checkpoint.path)
        unfinished = _unfinished(folder)
        sizes = [file.stat().st_size for file in unfinished.rglob("*") if file.is_file()]
        ready = msgspec.structs.replace(checkpoint, size_bytes=sum(sizes), created=time.time())
        (unfinished / FILE).write_bytes(msgspec.json.encode(ready))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def folder(self, path: str) -> Path:
        """Return the folder of a path.

        Raises:
            UserError: It is no path of a checkpoint.
        """
        parts = path.removeprefix(PREFIX).split("/")
        if not path.startswith(PREFIX) or len(parts) != 3 or parts[1] not in KINDS:
            raise UserError(f"{path!r:.200} is no path of a checkpoint (tinker://MODEL/KIND/NAME).")
        model_id, kind, name = parts
        model_name = model_id.replace(":", "-")
        for key, part in {"model": model_name, "name": name}.items():
            check_name(key, part)
            if not part.isascii():
                raise UserError(f"{key}: use ASCII letters, digits, '_', '-' and '.'.")
        return self._root / model_name / kind / name

    def read(self, path: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            UserError: There is none at this path, or it is another tenant's.
        """
        try:
            raw = (self.folder(path) / FILE).read_bytes()
        except FileNotFoundError:
            raise UserError(f"there is no checkpoint {path}.") from None
        return msgspec.json.decode(raw, type=Checkpoint)

    def list(self, model_id: str = "*") -> list[Checkpoint]:
        """Return the checkpoints of a model, or of all models, oldest first; no snapshots."""
        if model_id != "*":
            check_name("model", model_id.replace(":", "-"))
        files = self._root.glob(f"{model_id.replace(':', '-')}/*/[!.]*/{FILE}")
        checkpoints = [msgspec.json.decode(file.read_bytes(), type=Checkpoint) for file in files]
        named = [checkpoint for checkpoint in checkpoints if checkpoint.kind in TYPES]
        return sorted(named, key=lambda checkpoint: checkpoint.created)

    def remove(self, path: str) -> None:
        """Remove a checkpoint, if it exists."""
        shutil.rmtree(self.folder(path), ignore_errors=True)


def _unfinished(folder: Path) -> Path:
    """Return the folder of a checkpoint that is being written; no name begins with a dot."""
    return folder.with_name(f".{folder.name}")
