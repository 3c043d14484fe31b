"""Copies of an object by pickle."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from arealite.base.copies import Copier


def test_copies_share_classes_but_no_values():
    made: Any = make_dataclass("Made", [("items", list[int], field(default_factory=list[int]))])
    original = {"first": made([1]), "type": made}
    copier = Copier(original)
    original["first"].items.append(2)
    one, other = copier.copy(), copier.copy()
    assert one == other == {"first": made([1]), "type": made}
    one["first"].items.append(3)
    assert other["first"].items == [1]
    assert type(one["first"]) is made
