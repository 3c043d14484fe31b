"""Split the source of a test into cases. `harness.py` runs the cases."""

from __future__ import annotations  # `compile` hands it on to the tests

import ast
from collections.abc import Iterator
from typing import Any


class Instrumented(ast.NodeTransformer):
    """Makes each assert a case: the case reports its number, and the test continues if it fails.

    A `try` around asserts is one case, and so is a test without asserts: the exceptions that the
    test catches or raises are part of its check. An assert without a name is constant: it is
    reported only when it fails.
    """

    def __init__(self, source: str, numbers: Iterator[int]) -> None:
        self.numbers = numbers
        self.always = set[int]()
        """Numbers of the cases that are under no `if`."""
        tree = ast.parse(source)
        if any(map(has_name, ast.walk(tree))):
            self.visit(tree)
        else:
            tree.body = [self.case(*tree.body)]
        ast.fix_missing_locations(tree)
        self.code = compile(tree, "<test>", "exec")

    def case(self, *body: ast.stmt) -> ast.Try:
        """Return a statement that reports whether `body` raises."""
        number = next(self.numbers)
        template = ast.parse(
            f"try: pass\nexcept BaseException: _failed({number})\nelse: _passed({number})"
        )
        statement: Any = template.body[0]
        statement.body = [*body]
        self.always.add(number)
        return statement

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Turn an assert into a case."""
        always = set(self.always)
        statement = self.case(node)
        if not has_name(node):
            statement.orelse = []
            self.always = always
        return statement

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Turn a `try` that has handlers and asserts into one case."""
        has_assert = any(isinstance(child, ast.Assert) for child in ast.walk(node))
        if node.handlers and has_assert:
            return self.case(node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """Visit asserts under an `if`: they are cases only if the test reaches them."""
        always = set(self.always)
        self.generic_visit(node)
        self.always = always
        return node


def has_name(node: ast.AST) -> bool:
    """Return whether `node` is an assert whose condition contains a name."""
    if not isinstance(node, ast.Assert):
        return False
    condition = ast.walk(node.test)
    return any(isinstance(child, ast.Name) for child in condition)
