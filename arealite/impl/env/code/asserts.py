"""Splits the source of a test into cases.

Apart from `harness.py`, which runs them: nothing here needs a program or a process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


class Instrumented(ast.NodeTransformer):
    """Makes each assert a case, which reports its number and lets the test go on if it fails.

    A `try` around asserts is one case, as is a test without asserts: the exceptions that it
    catches or raises belong to what it checks. An assert without a name in it can only fail.
    """

    def __init__(self, source: str, numbers: Iterator[int]) -> None:
        self.numbers, self.always = numbers, set[int]()
        """Cases that are under no `if`."""
        tree = ast.parse(source)
        if any(map(has_name, ast.walk(tree))):
            self.visit(tree)
        else:
            tree.body = [self.case(*tree.body)]
        self.code = compile(ast.fix_missing_locations(tree), "<test>", "exec")

    def case(self, *body: ast.stmt) -> ast.Try:
        """Return a statement that reports whether `body` raises."""
        number = next(self.numbers)
        text = f"try: pass\nexcept BaseException: _failed({number})\nelse: _passed({number})"
        frame: Any = ast.parse(text).body[0]
        frame.body = [*body]
        self.always.add(number)
        return frame

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Make a case of an assert."""
        always, frame = set(self.always), self.case(node)
        if not has_name(node):
            frame.orelse, self.always = [], always
        return frame

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Make a case of a `try` that catches, and has asserts."""
        if node.handlers and any(isinstance(part, ast.Assert) for part in ast.walk(node)):
            return self.case(node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """Make cases that count only if they are reached."""
        always = set(self.always)
        self.generic_visit(node)
        self.always = always
        return node


def has_name(node: ast.AST) -> bool:
    """Return whether this is an assert about something that has a name."""
    parts = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
    return any(isinstance(part, ast.Name) for part in parts)
