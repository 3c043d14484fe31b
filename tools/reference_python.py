"""The page docs/reference/python.md: the public classes and functions, from their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import arealite
from arealite.base.registry import Registry

HEAD = """\
# Python API

`import arealite` gives these names. [Python and notebooks](../python.md) shows how to use them.
Classes to derive from are for [agents](../agents.md), [environments](../environments.md), rewards
and tools. A method marked *abstract* has to be defined by your class.
"""
GROUPS = {
    "Functions": ("train", "evaluate", "collect", "serve", "make", "make_vec", "wrap"),
    "Results": ("Run", "Facts", "Server"),
    "Your own loop": ("session", "Session", "Call", "Sample", "Sequence", "LossInput"),
    "Environments": ("Env", "StepEnv", "StepResult", "Task", "Row"),
    "Requests": ("Request", "TimeLimit", "ScaleReward", "TransformObservation", "Record"),
    "Agents": ("Agent", "Action"),
    "Rewards and tools": ("Reward", "Score", "Tool"),
    "Training": ("Trainer", "TrainEngine"),
    "Errors": ("UserError",),
    "Registries": ("envs", "agents", "rewards", "tools"),
}
SECTION = re.compile(r"^(Args|Returns|Yields|Raises):$")
ITEM = re.compile(r"^(\*{0,2}[\w.]+): ")


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for group, names in GROUPS.items():
        lines.append(f"## {group}\n")
        for name in names:
            if (value := find(name)) is not None:
                lines += [*described(name, value)]
    return "\n".join(lines).rstrip() + "\n"


def find(name: str) -> Any:
    """Return the object of a public name, or of a type that a public function returns."""
    from arealite.ext.notebook import functions, run

    inner = {"Facts": run.Facts, "Server": functions.Server}
    return inner[name] if name in inner else getattr(arealite, name)


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one name: a heading, its signature, its text, its methods."""
    yield f"### {name}\n"
    if isinstance(value, Registry):
        built_in = ", ".join(f"`{each}`" for each, home in value._table.items() if is_own(home))
        use = f'`@arealite.{name}.register("NAME")` above a class registers it.'
        yield textwrap.fill(f"{use} Built in: {built_in}.", 100, break_on_hyphens=False) + "\n"
    elif inspect.isclass(value):
        bases = [base.__name__ for base in value.__mro__[1:2] if base.__module__ != "builtins"]
        yield code(f"class {name}({', '.join(b for b in bases if b not in ('ABC', 'Struct'))})")
        yield text(inspect.getdoc(value) or "")
        yield from attributes(value)
        yield from methods(name, value)
    elif inspect.isfunction(value):
        yield code(f"{name}{signature(value)}")
        yield text(inspect.getdoc(value) or "")
    else:
        yield "A row of a data set: a mapping with `prompt`, `ground_truth` and `extra_info`.\n"


def is_own(home: object) -> bool:
    """Return whether a registered part is the package's, not a test's."""
    line = home if isinstance(home, str) else getattr(home, "__module__", "")
    return line.startswith("arealite.")


def attributes(value: type) -> Iterator[str]:
    """Yield a list item for each documented attribute of a class, in the order of the source."""
    tree = ast.parse(source(value)).body[0]
    assert isinstance(tree, ast.ClassDef)
    bodies = [tree.body, *(f.body for f in tree.body if is_named(f, "__init__"))]
    for body in bodies:
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            label = ast.unparse(target).removeprefix("self.") if target else "_"
            if label.startswith("_") or not (is_text or dataclasses.is_dataclass(value)):
                continue
            own = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
            about = " ".join(str(after.value.value).split()) if is_text else ""  # type: ignore
            yield wrapped(f"* `{label}{own}`{f': {about}' if about else ''}")
    yield ""


def methods(name: str, value: type) -> Iterator[str]:
    """Yield the public methods and properties of a class itself, in the order of the source."""
    for key, member in vars(value).items():
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if key.startswith("_") or not inspect.isfunction(inner) or not inspect.getdoc(inner):
            continue
        marks = "".join(
            f"{mark} "
            for mark, holds in {
                "abstract": getattr(member, "__isabstractmethod__", False),
                "property": isinstance(member, property),
                "classmethod": isinstance(member, classmethod),
                "staticmethod": isinstance(member, staticmethod),
                "async": inspect.iscoroutinefunction(inner),
            }.items()
            if holds
        )
        yield f"#### {name}.{key}\n"
        yield code(marks + key + ("" if isinstance(member, property) else signature(inner)))
        yield text(inspect.getdoc(inner) or "")


def source(value: Any) -> str:
    """Return the source of a class or function, without indentation."""
    return textwrap.dedent(inspect.getsource(value))


def is_named(node: ast.stmt, name: str) -> bool:
    """Return whether a statement defines a function of this name."""
    return isinstance(node, ast.FunctionDef) and node.name == name


def signature(function: Any) -> str:
    """Return a signature, without `self`, one parameter a line if it is long."""
    found, node = inspect.signature(function), ast.parse(source(function)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    # As in the source: the names of annotations, without their modules.
    types = {arg.arg: ast.unparse(arg.annotation) for arg in ast.walk(node.args)
             if isinstance(arg, ast.arg) and arg.annotation}  # fmt: skip
    own = [
        each.replace(annotation=types.get(name, each.empty))
        for name, each in found.parameters.items()
        if name not in ("self", "cls")
    ]
    returned = ast.unparse(node.returns) if node.returns else found.empty
    shown = found.replace(parameters=own, return_annotation=returned)
    whole = re.sub(r"(: |-> )'([^']+)'", r"\1\2", str(shown))
    if len(whole) < 90:
        return whole
    inside, _, returned = whole[1:].rpartition(") -> ")
    return f"(\n{parameters(inside)}\n) -> {returned}"


def parameters(inside: str) -> str:
    """Split the text between the brackets of a signature into lines."""
    pieces = re.split(r", (?=\*|[\w]+: )", inside)
    return "\n".join(f"    {piece}," for piece in pieces)


def code(line: str) -> str:
    """Return Python code as a block."""
    return f"```python\n{line.replace('()', '') if line.startswith('class') else line}\n```\n"


def text(doc: str) -> str:
    """Return a docstring in Google style as Markdown: sections become lists."""
    found, section = list[str](), ""
    for line in doc.splitlines():
        if heading := SECTION.match(line):
            section = heading[1]
            found += [f"{section}:", ""]
        elif section and line.startswith("    ") and not line.startswith("        "):
            own = ITEM.sub(lambda name: f"`{name[1]}`: ", line.strip())
            is_list = section in ("Args", "Raises")
            found.append(f"* {own}" if is_list else own)
        elif section and line.startswith("        ") and found:
            found[-1] += f" {line.strip()}"
        else:
            section = "" if line.strip() else section
            found.append(line)
    return "\n".join(wrapped(line) if line.startswith("* ") else line for line in found) + "\n"


def wrapped(line: str) -> str:
    """Return a list item in lines of at most 100 characters."""
    unbroken = re.sub(r"`[^`]+`", lambda found: found[0].replace(" ", "\0"), line)
    lines = textwrap.wrap(unbroken, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
