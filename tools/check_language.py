"""Check the language rules of CONTRIBUTING.md that a program can check; exit 1 if one is broken.

* Docstrings and comments of the package name their subject: no "who", "whom" or "what of".
* The docstring of a public function begins with a verb of tools/verbs.txt (technical verbs; add one
  if it is missing) or with a subject in backticks. Properties and classes may begin with a noun.
* A line of Markdown has at most 110 characters. Tables, code blocks and links are excepted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN_COLUMNS = 110
RIDDLE = re.compile(r"\b(who|whom|what of)\b", re.IGNORECASE)
LINK = re.compile(r"\[[^\]]*\]\([^)]*\)|https?://\S+")

VERBS = frozenset((ROOT / "tools/verbs.txt").read_text().split())


def main() -> int:
    """Print each breach with its file and line; return 1 if there is one."""
    breaches = [
        breach
        for file in tracked()
        if (ROOT / file).exists()
        for breach in (markdown(file) if file.suffix == ".md" else python(file))
    ]
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


def tracked() -> list[Path]:
    """Return the package's Python files and all Markdown files, as git knows them."""
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "arealite/*.py",
        "*.md",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines()]


def markdown(file: Path) -> Iterator[str]:
    """Yield the lines that are too long and no table, code or link."""
    is_code = False
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        is_free = is_code or line.startswith(("    ", "|")) or LINK.search(line)
        if len(line) > MARKDOWN_COLUMNS and not is_free:
            yield f"{file}:{number}: {len(line)} characters, at most {MARKDOWN_COLUMNS}: wrap it"


def python(file: Path) -> Iterator[str]:
    """Yield the docstrings and comments of one module that break a rule."""
    text = (ROOT / file).read_text()
    module = ast.parse(text)
    for number, said in [*docstrings(module), *comments(text)]:
        if found := RIDDLE.search(said):
            yield f'{file}:{number}: "{found[0]}": name the subject ("{excerpt(said)}")'
    yield from fragments(file, module, is_public=True)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that stands alone as a statement."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(said))):
                yield node.lineno, said
            case _:
                pass


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def fragments(file: Path, node: ast.AST, is_public: bool) -> Iterator[str]:
    """Yield the public functions whose docstring begins with neither a verb nor a named subject."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from fragments(file, child, is_public and not child.name.startswith("_"))
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            said = ast.get_docstring(child) or ""
            if is_public and not child.name.startswith("_") and not is_property(child) and said:
                first = re.split(r"[\s,;.:]", said, maxsplit=1)[0]
                if first.lower() not in VERBS and not first.startswith("`"):
                    yield (
                        f"{file}:{child.lineno}: {child.name}: its docstring begins with "
                        f'"{first}": begin with a verb of tools/verbs.txt'
                    )


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator makes an attribute of the function."""
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def excerpt(said: str) -> str:
    """Return the beginning of a docstring or comment, on one line."""
    return " ".join(said.split())[:60]


if __name__ == "__main__":
    sys.exit(main())
