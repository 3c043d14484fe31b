"""Copies of an object that has many parts: a pickle is read in a tenth of a deepcopy's time."""

import io
import pickle
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Copier(Generic[T]):
    """Copies one object. Classes are not copied; they may have been made by a function."""

    def __init__(self, original: T) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(original)
        self._pickle = file.getvalue()
        self._classes = [*pickler.classes]

    def copy(self) -> T:
        """Return a copy of the object as it was at first."""
        return _Unpickler(self._pickle, self._classes).load()


class _Pickler(pickle.Pickler):
    """Writes the number of a class in the place of its name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.classes: dict[type, int] = {}
        """The number of each class."""

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, type):
            return None
        return self.classes.setdefault(obj, len(self.classes))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, classes: Sequence[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = classes

    def persistent_load(self, pid: int) -> type:
        return self._classes[pid]
