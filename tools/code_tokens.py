"""Count the tokens of Python code, its lines, and names that say nothing about their value.

    tools/code_tokens.py PATH…    print the counts of files and folders

A token is a name, a keyword, a number, an operator or a string, outside comments and docstrings. An
f-string is one token on every version of Python, with all that it contains. A line counts if it has
a token. This module uses the standard library alone, so any interpreter can run it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILLERS = """
about each every fix found given known made own rest said text told what where why
"""
FILLERS = frozenset(_FILLERS.split())
"""Names that fit any value; a name must say what its value is."""
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
STARTS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
"""Kinds of tokens that begin an f-string; Python 3.11 has none, because it reads one string."""
ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a piece of code; two are added by `+`."""

    tokens: int = 0
    lines: int = 0
    names: int = 0
    """Assigned variables, parameters and captures, each place counted."""
    fillers: int = 0
    """Those of `names` that are in FILLERS."""
    tuple_assignments: int = 0
    """Assignments with a tuple on both sides, swaps aside."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            tokens=self.tokens + other.tokens,
            lines=self.lines + other.lines,
            names=self.names + other.names,
            fillers=self.fillers + other.fillers,
            tuple_assignments=self.tuple_assignments + other.tuple_assignments,
        )

    @property
    def tokens_per_line(self) -> float:
        """The density of the code; 0 without code."""
        return self.tokens / self.lines if self.lines else 0.0

    @property
    def filler_percent(self) -> float:
        """The share of fillers among the names, in percent; 0 without names."""
        return 100 * self.fillers / self.names if self.names else 0.0

    @property
    def tuple_assignments_per_1000(self) -> float:
        """Tuple assignments per 1,000 lines; 0 without code."""
        return 1000 * self.tuple_assignments / self.lines if self.lines else 0.0


def count(source: str) -> Counts:
    """Return the counts of a module.

    Raises:
        SyntaxError: The source is not Python.
    """
    tokens_of_line = tokens_by_line(source)
    names = list(stored_names(source))
    return Counts(
        tokens=sum(tokens_of_line.values()),
        lines=len(tokens_of_line),
        names=len(names),
        fillers=sum(name.strip("_") in FILLERS for name in names),
        tuple_assignments=sum(map(_is_tuple_assignment, nodes_of(source))),
    )


@cache
def nodes_of(source: str) -> Sequence[ast.AST]:
    """Return all nodes of the syntax tree of a module, the root first.

    Raises:
        SyntaxError: The source is not Python.
    """
    return [*ast.walk(ast.parse(source))]


@cache
def tokens_by_line(source: str) -> dict[int, int]:
    """Return the number of tokens that begin on each line of code, by line number.

    A line inside a string of several lines has 0 tokens.
    """
    docstrings = {(node.lineno, node.col_offset) for node in _docstrings(source)}
    tokens_of_line = dict[int, int]()
    open_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_start = token.type in STARTS
        if (token.type in COUNTED or is_start) and not open_strings:
            if token.type == tokenize.STRING and token.start in docstrings:
                continue
            first_line = token.start[0]
            tokens_of_line[first_line] = tokens_of_line.get(first_line, 0) + 1
        open_strings += is_start - (token.type in ENDS)
        if token.type in COUNTED or token.type in ENDS:
            for line in range(token.start[0], token.end[0] + 1):
                tokens_of_line.setdefault(line, 0)
    return tokens_of_line


def stored_names(source: str) -> Iterator[str]:
    """Yield each name that code assigns: variables, fields, parameters and captures."""
    for node in nodes_of(source):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case _:
                pass


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions and methods, also inner ones."""
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def tokens_within(node: ast.stmt, tokens_of_line: dict[int, int]) -> int:
    """Return the tokens of a statement's lines."""
    last_line = node.end_lineno or node.lineno
    return sum(tokens_of_line.get(line, 0) for line in range(node.lineno, last_line + 1))


def _docstrings(source: str) -> Iterator[ast.Constant]:
    """Yield the strings that are statements: docstrings of functions, classes and variables."""
    for node in nodes_of(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a statement assigns a tuple of values to a tuple, and is not a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    values = sorted(ast.unparse(value) for value in node.value.elts)
    return any(
        isinstance(target, ast.Tuple)
        and sorted(ast.unparse(element) for element in target.elts) != values
        for target in node.targets
    )


def main() -> None:
    """Print the counts of the files and folders on the command line."""
    print("tokens   per line   fillers   tuple assignments per 1,000 lines   path")
    for path in map(Path, sys.argv[1:]):
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        counts = sum((count(file.read_text("utf-8")) for file in files), Counts())
        print(
            f"{counts.tokens:6}   {counts.tokens_per_line:8.1f}   {counts.filler_percent:5.1f} %   "
            f"{counts.tuple_assignments_per_1000:33.1f}   {path}"
        )


if __name__ == "__main__":
    main()
