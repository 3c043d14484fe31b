"""Makes SGLang importable without a GPU: stubs of the CUDA packages that it imports.

tools/setup_sglang_cpu.sh installs this file and a .pth line into the virtual environment, so that
every process of the server has the stubs from its start. An installed package has precedence.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

MODULES = {"sgl_kernel", "sgl_kernel.kvcacheio"}
"""Other modules of sgl_kernel must stay missing: SGLang then uses plain torch code."""
PACKAGES = {"torchvision"}
"""Packages that are stubbed with all their submodules."""


class Absent(type):
    """Metaclass of stubs: they work in annotations, as base classes and in isinstance, and their
    attributes are stubs; calling a stub is an error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")


def absent(name: str) -> Any:
    """Return the stub of `name`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} was called, but only a stand-in of it is installed (no GPU)")

    return Absent(name, (), {"__new__": refuse})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder of the modules above; it is asked last."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES and name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return absent(f"{module.__name__}.{name}")

        module.__dict__["__getattr__"] = attribute


class ImageProcessorFix(importlib.abc.MetaPathFinder):
    """Corrects what transformers 5.12 believes of AutoImageProcessor, right after the import.

    transformers reads each file for the backends that its classes need. The word TorchvisionBackend
    in the file of AutoImageProcessor makes it a class that needs torchvision, which it does not.
    SGLang registers its own processors with that class as soon as it is imported.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "transformers.utils.import_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_fix(module: ModuleType) -> None:
                execute(module)
                known = getattr(module, "BASE_FILE_REQUIREMENTS", None)
                if isinstance(known, dict):  # the first that is true of a file counts
                    module.__dict__["BASE_FILE_REQUIREMENTS"] = {is_auto: ("vision",)} | known

            spec.loader.exec_module = execute_and_fix
        return spec


class PinnedMemoryFix(importlib.abc.MetaPathFinder):
    """Lets SGLang's adapters allocate memory on a machine without an accelerator.

    They ask for pinned memory without a check, which torch refuses there.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "sglang.srt.lora.lora_manager":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            use_plain_memory()
        return spec


def use_plain_memory() -> None:
    """Ignore requests for pinned memory if there is no accelerator."""
    import torch

    if torch.accelerator.is_available():
        return
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("empty", "tensor", "zeros", "ones"):
        allocate = getattr(torch, name)

        def unpinned(*args: Any, _allocate: Any = allocate, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return _allocate(*args, **options)

        setattr(torch, name, unpinned)


def is_auto(name: str, *_: Any) -> bool:
    """Return whether this is the file of AutoImageProcessor."""
    return name.removesuffix(".py") == "image_processing_auto"


def install() -> None:
    """Add the stubs to this interpreter; importlib.util.find_spec does not find them."""
    stand_ins, real = StandIns(), importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        spec = real(name, package)
        return None if spec is not None and spec.loader is stand_ins else spec

    importlib.util.find_spec = find_spec
    sys.meta_path.append(stand_ins)
    sys.meta_path.insert(0, ImageProcessorFix())
    sys.meta_path.insert(0, PinnedMemoryFix())


install()
