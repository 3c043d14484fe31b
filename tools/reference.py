"""Write docs/reference/: config keys, commands, metrics and the Python API, from the code.

    python3 tools/reference.py           # write the pages
    python3 tools/reference.py --check   # exit 1 if a page differs from the code

A test and `make check` compare the pages with the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.api.experiment_config import ExperimentConfig, ServerConfig  # noqa: E402
from arealite.api.logger import loggers  # noqa: E402
from arealite.base import config_tree, errors  # noqa: E402
from arealite.base.extras import extra_requirement  # noqa: E402
from arealite.cli import main as cli  # noqa: E402
from arealite.ext.evaluation.config import CollectConfig, EvaluateConfig  # noqa: E402
from arealite.ext.hosting.server_config import EnvServerConfig  # noqa: E402
from arealite.ext.tinker.config import TinkerServerConfig  # noqa: E402
from arealite.ext.view.metric_names import catalogue  # noqa: E402
from tools import reference_python  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py: change the code, then run it (`make reference`). -->\n"
ROOTS: list[tuple[str, type, type | None]] = [
    ("train.py", ExperimentConfig, None),
    ("launch_llm_server", ServerConfig, None),
    ("arealite serve", EnvServerConfig, None),
    ("arealite serve-tinker", TinkerServerConfig, ExperimentConfig),
    ("arealite eval", EvaluateConfig, ExperimentConfig),
    ("arealite collect", CollectConfig, ExperimentConfig),
]
"""Command that reads a config, schema of the config, and the config that it extends."""
WIDTH = "100"
"""Columns of a terminal that prints a command's help."""
COLUMNS, GAP = 100, "\0"
"""Longest line of a paragraph, and what replaces a space that must not end a line."""
Places = dict[type, tuple[str, str]]


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write docs/reference from the code.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is stale"
    )
    is_check = parser.parse_args().check
    stale = [name for name, text in pages().items() if read(FOLDER / name) != text]
    for name in stale:
        if not is_check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_text(pages()[name], "utf-8")
        print(f"docs/reference/{name}: {'stale; run make reference' if is_check else 'written'}")
    return 1 if is_check and stale else 0


def pages() -> dict[str, str]:
    """Return each page's text, by file name."""
    return {
        "config.md": f"{NOTE}\n{config_page()}",
        "commands.md": f"{NOTE}\n{commands_page()}",
        "metrics.md": f"{NOTE}\n{metrics_page()}",
        "python.md": f"{NOTE}\n{reference_python.page()}",
    }


def wrap(text: str) -> str:
    """Return a paragraph in lines of at most COLUMNS characters. Code stays in one line."""
    unbroken = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", GAP), text)
    lines = textwrap.wrap(unbroken, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(GAP, " ") + "\n"


def read(file: Path) -> str:
    """Return the text of a file, or "" if it does not exist."""
    return file.read_text("utf-8") if file.exists() else ""


# ---------------------------------------------------------------- config keys


def config_page() -> str:
    """List every key of every root config, by section; a repeated class is a link."""
    head = (
        "YAML files and `key=value` arguments configure a run: `train.py --config config/ppo.yaml "
        "trainer.ppo.lr=1e-6`. A later file overrides an earlier one, and an argument overrides "
        "every file. An unknown key, a value of another type and a value out of range are refused. "
        "`null` means no value. A value is YAML: a text such as `=` needs quotes for YAML and for "
        "the shell, as in `key='\"=\"'`. `NAME` stands for a name of your choice. A class that you "
        "register "
        "adds its keys under its registered name."
    )
    sections = (root_page(*root, places()) for root in ROOTS)
    return "\n".join(["# Config keys\n", wrap(head), *sections])


def places() -> Places:
    """Return where the keys of each config class are listed: (root, section), the least nested."""
    found: Places = {}
    for title, schema, _ in ROOTS:
        parents = [path.split(".")[:-1] for path, _, _ in config_tree.leaves(schema)]
        sections = dict.fromkeys(
            ".".join(names[:n]) for names in parents for n in range(1, len(names) + 1)
        )
        for section in sorted(sections, key=lambda path: path.count(".")):
            found.setdefault(class_at(schema, section), (title, section))
    return found


def root_page(title: str, schema: type, added_to: type | None, seen: Places) -> str:
    """Describe one root config: a table for each of its sections."""
    known = [(key, default) for key, default, _ in config_tree.keys(added_to)] if added_to else []
    listed = zip(config_tree.keys(schema), config_tree.leaves(schema), strict=True)
    sections: dict[str, list[str]] = {}
    elsewhere: dict[str, str] = {}
    for (path, default, _), (_, item, held) in listed:
        if (path, default) in known:
            continue
        parent = path.rpartition(".")[0]
        if found := listed_elsewhere(title, schema, parent, seen):
            sections.setdefault(found[0], [])
            elsewhere[found[0]] = found[1]
        else:
            sections.setdefault(parent, []).extend(key_lines(path, item, held, default, seen))
    lines = [f"## {title}\n"]
    if added_to:
        lines.append("All keys of train.py, and these keys or other defaults:\n")
    for section, rows in sections.items():
        if section:
            lines.append(f"### {section}\n")
        if section in elsewhere:
            lines.append(f"The keys of {elsewhere[section]}.\n")
            continue
        if section:
            lines.append(wrap(about(class_at(schema, section))))
        lines += ["| key | type | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def listed_elsewhere(title: str, schema: type, parent: str, seen: Places) -> tuple[str, str] | None:
    """Return (section, place) where a section that holds `parent` is listed at another place."""
    names = parent.split(".") if parent else []
    for n in range(1, len(names) + 1):
        section = ".".join(names[:n])
        place = seen[class_at(schema, section)]
        if place != (title, section):
            return section, f"`{place[1]}`" + (f" of {place[0]}" if place[0] != title else "")
    return None


def class_at(schema: type, path: str) -> type:
    """Return the config class of a section."""
    held: Any = schema
    for name in path.split("."):
        held = get_type_hints(held)[name]
    return held


def about(held: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return (inspect.getdoc(held) or "").split("\n\n")[0].replace("\n", " ")


def key_lines(
    path: str, item: dataclasses.Field[Any], held: Any, default: Any, seen: Places
) -> Iterator[str]:
    """Yield the line of a key; for a dict of configs, also the lines of its fields."""
    text = "; ".join(filter(None, (item.metadata.get("help"), config_tree.range_of(item))))
    yield line(f"`{path}`", type_name(held), f"`{shown(default)}`", text)
    inner = config_tree.element(held)
    if inner is None:
        return
    if inner in seen:
        yield line(f"`{path}.NAME.*`", "", "", f"the keys of `{seen[inner][1]}`")
        return
    for field in dataclasses.fields(inner):
        own, made = get_type_hints(inner)[field.name], field.default_factory
        found, key = config_tree.element(own) or own, f"{path}.NAME.{field.name}"
        if found in seen:
            yield line(f"`{key}.*`", "", "", f"the keys of `{seen[found][1]}`")
            continue
        default = field.default if made is dataclasses.MISSING else made()
        yield from key_lines(key, field, own, default, seen)


def line(*cells: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def type_name(held: Any) -> str:
    """Write a type in words of YAML."""
    origin, inner = get_origin(held), get_args(held)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in inner).replace("\\|", "|")
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else type_name(each) for each in inner)
    if origin in (list, tuple):
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        return f"map of {type_name(inner[1])}"
    return {"Any": "anything"}.get(name := getattr(held, "__name__", str(held)), name)


def shown(value: Any) -> str:
    """Write a default as YAML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    plain = {None: "null", True: "true", False: "false"}
    if isinstance(value, (bool, type(None))):
        return plain[value]
    return str(value) if str(value) else '""'


# ---------------------------------------------------------------- commands


def commands_page() -> str:
    """Show the help of each command, and the meaning of the exit codes."""
    lines = [
        "# Commands\n",
        "`train.py` is `arealite train`, and `arealite/launch_llm_server.py` is `arealite "
        "serve-llm`.\nThe keys of each command are in [config keys](config.md).\n",
        "| command | |",
        "|---|---|",
        *(line(f"[`{name}`](#{name})", text) for name, text in cli.COMMANDS.items()),
        "",
    ]
    for name in cli.COMMANDS:
        lines.append(f"## {name}\n\n```text\n{help_of(name)}\n```\n")
    return "\n".join([*lines, exit_codes()])


def help_of(name: str) -> str:
    """Return what `arealite NAME --help` prints, without the list of keys."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), WIDTH
    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
            cli.main([name, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue().partition("keys and their defaults:")[0].rstrip()


def exit_codes() -> str:
    """List the exit codes, from the error classes."""
    kinds = (errors.UserError, errors.InvariantError, errors.RoleError)
    meanings = {
        0: "success",
        1: "the checked property does not hold (audit, replay), or a bug with its traceback",
    }
    meanings |= {
        kind.exit_code: (kind.__doc__ or "").partition("\n")[0].rstrip(".") for kind in kinds
    }
    meanings |= {
        130: "stopped by Ctrl-C; a run also by SIGTERM or SIGHUP",
        141: "its output was closed, as after `| head`; never of a command that runs or serves",
    }
    rows = [line(f"{code}", text) for code, text in sorted(meanings.items())]
    return "\n".join(["## Exit codes\n", "| code | |", "|---|---|", *rows, ""])


# ---------------------------------------------------------------- metrics


def metrics_page() -> str:
    """List the metrics by group, and the loggers."""
    head = (
        "`metrics.jsonl` and each logger of `logger.types` get these metrics once per step and "
        "once per evaluation. `{a,b}` stands for one of the words, and `<x>` for a "
        "name that you chose. "
        "Suffixes: `_s` is seconds, `_frac` is a share from 0 to 1, `_max` is the largest value."
    )
    lines = ["# Metrics\n", wrap(head)]
    groups = itertools.groupby(catalogue().items(), key=lambda pair: pair[0].split("/")[0])
    for group, own in groups:
        lines += [f"## {group}\n", "| name | |", "|---|---|"]
        lines += [*(line(f"`{name}`", text) for name, text in own), ""]
    return "\n".join([*lines, loggers_section()])


def loggers_section() -> str:
    """Describe each logger.

    The text is the docstring of the class if the logger needs a package, else of the module.
    """
    head = (
        "`metrics.jsonl` is always written. `logger.types` adds others: "
        "`'logger.types=[tensorboard,wandb]'`. A logger that fails or blocks is disabled with one "
        "warning in the trainer's log. It never stops training."
    )
    lines = ["## Loggers\n", wrap(head)]
    for name in loggers.names():
        kind: Any = loggers.get(name)
        if not kind.__module__.startswith("arealite."):  # a test's
            continue
        package = getattr(kind, "package", "")
        text = " ".join(
            (inspect.getdoc(kind if package else inspect.getmodule(kind)) or "").split()
        )
        how = f" `pip install {extra_requirement(package)}`." if package else ""
        lines.append(wrap(f"**{name}**: {text}{how}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
