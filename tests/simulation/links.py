"""Converts the package's TrainerLink to coroutines, so that many ranks share one event loop.

The methods of TrainerLink block. This module rewrites its source: each method that polls or sleeps,
directly or through other methods, becomes a coroutine and is awaited. So the simulation always runs
the current code of the package.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

from arealite.system.links import trainer_link

BLOCKING = {"poll", "sleep"}


class _Awaiting(ast.NodeTransformer):
    """Adds `await` to calls of blocking methods of `self`, and of poll and sleep."""

    def __init__(self, blocking: set[str]) -> None:
        self.blocking = blocking

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        return ast.Await(node) if _called(node) in self.blocking | BLOCKING else node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return node  # nested: called back, never blocking


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _calls(node: ast.AST) -> set[str]:
    return {_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)}


@lru_cache(maxsize=1)
def async_link(source_of: ModuleType = trainer_link) -> type[Any]:
    """Return TrainerLink with coroutines for the methods that block."""
    tree = ast.parse(inspect.getsource(source_of))
    link = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TrainerLink")
    methods = {n.name: n for n in link.body if isinstance(n, ast.FunctionDef)}
    blocking: set[str] = set()
    while more := {
        name
        for name, n in methods.items()
        if name not in blocking and _calls(n) & (blocking | BLOCKING)
    }:
        blocking |= more
    for place, node in enumerate(link.body):
        if isinstance(node, ast.FunctionDef) and node.name in blocking:
            awaiting = _Awaiting(blocking)
            body = [awaiting.visit(statement) for statement in node.body]
            fields = {f: getattr(node, f, None) for f in node._fields} | {"body": body}
            link.body[place] = ast.AsyncFunctionDef(**fields)
    ast.fix_missing_locations(tree)
    module = ModuleType("tests.simulation.async_trainer_link")
    sys.modules[module.__name__] = module
    module.__dict__["__file__"] = source_of.__file__
    exec(compile(tree, str(source_of.__file__), "exec"), module.__dict__)
    return module.TrainerLink
