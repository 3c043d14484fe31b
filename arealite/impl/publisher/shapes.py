"""Names and shapes of tensors, checked before anything is sent.

SGLang answers 200 to a tensor of the wrong shape or of an unknown name, and generates from what
came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from arealite.base.errors import RoleError

Shapes = Mapping[str, list[int]]


def check_shapes(sent: Shapes, held: Shapes, *, where: str | Path, whole: bool = True) -> None:
    """Check the tensors to be sent against those that `where` holds; {} holds none to compare.

    A tensor that is held but not sent must be the output head, tied to the embedding; `whole` False
    looks at the tensors of `sent` only.

    Raises:
        RoleError: names the first tensor that does not fit, and both shapes.
    """
    if not held:
        return
    for name, shape in sent.items():
        if name not in held:
            raise RoleError(f"tensor '{name}' {list(shape)} of the trainer is not in {where}")
        if list(shape) != list(held[name]):
            raise RoleError(
                f"tensor '{name}' has shape {list(shape)} in the trainer, but {held[name]} in "
                f"{where}"
            )
    for name in held.keys() - sent.keys() if whole else ():
        if not name.endswith(("lm_head.weight", ".inv_freq")):
            raise RoleError(f"tensor '{name}' {held[name]} of {where} is not in the trainer")
