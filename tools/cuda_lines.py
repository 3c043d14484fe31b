"""List the code that only a machine with GPUs runs, and the row of `check --machine` that does.

    PYTHONPATH=. .venv/bin/python tools/cuda_lines.py [--out out/cuda_lines.json]

The tool runs the rows of ROWS on this machine under coverage. A condition about GPUs is listed with
the lines below it that the rows did not run. The tool exits 1 if the rows do not evaluate such a
condition, or if a condition has no row. Run it on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "arealite"
WORDS = re.compile(r"cuda|nccl|gpu|flash_attn|device_type", re.I)
"""Matches a condition that a GPU changes."""
ROWS = {
    "ext/machine/estimates.py": "command: arealite check",
    "ext/machine/info.py": "report: devices of the host",
    "ext/machine/command.py": "every row",
    "ext/machine/bench.py": "every row",
    "ext/machine/checks.py": "step/bfloat16",
    "ext/machine/serving.py": "publish/disk/embedded",
    "ext/prefix_trees/attention.py": "train/packed/bfloat16",
    "ext/models/context_parallel.py": "train/context parallel/2 ranks",
    "impl/engine/fsdp.py": "train/padded/float32",
    "impl/engine/model.py": "train/cpu offload",
    "impl/launcher/processes.py": "publish/disk/embedded",
    "ext/clusters/ray.py": "none: a cluster places the GPUs",
    "ext/clusters/slurm_job.py": "none: a cluster places the GPUs",
    "ext/clusters/slurm.py": "none: a cluster places the GPUs",
    "impl/launcher/local.py": "none: tests/impl/launcher; a run with several servers",
    "ext/distributed/distributed_publisher.py": "publish/distributed/embedded",
    "ext/self_check/plain_copy.py": "command: arealite check --model",
    "ext/embedded/group_member.py": "publish/distributed/embedded",
    "ext/sglang/sglang_server.py": "publish/disk/sglang",
    "ext/embedded/weight_loading.py": "publish/disk/embedded",
    "impl/trainer/rank_group.py": "train/padded/float32",
    "base/exit_record.py": "none: a text of torch in an exception",
    "ext/session/start_checks.py": "none: refuses a session with more ranks than GPUs",
}
"""The row that reaches the conditions of a file."""
COMMAND = [*("-m", "arealite.cli.main", "check", "--machine", "--quick", "--only")]


@dataclass(frozen=True)
class Condition:
    """A condition that depends on GPUs."""

    file: str
    line: int
    text: str
    lines: list[int]
    """Lines below it that did not run on this machine."""
    row: str


def conditions(file: Path) -> Iterator[tuple[int, str, list[int]]]:
    """Yield the line of each condition about GPUs, its source, and the lines below it.

    Conditions that hold without a GPU only are left out: tests evaluate them.
    """
    source = file.read_text()
    if not WORDS.search(source):
        return
    tree, lines = ast.parse(source), source.encode().split(b"\n")
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    listed = set[int]()
    for node in ast.walk(tree):
        below, test = list[ast.stmt](), getattr(node, "test", node)
        if not isinstance(node, ast.If | ast.IfExp | ast.Compare) or node.lineno in listed:
            continue
        text = " ".join(source_of(test, lines).split())
        if not WORDS.search(text) or "not torch.cuda" in text:
            continue
        if isinstance(node, ast.If):
            below = [*node.body, *node.orelse]
            # Functions of the file that are called there are a part of it.
            names = {n.id for part in below for n in ast.walk(part) if isinstance(n, ast.Name)}
            below += [each for name in names & functions.keys() for each in functions[name].body]
        listed.add(node.lineno)
        yield node.lineno, text, [n for part in below for n in range(part.lineno, end(part) + 1)]


def unlisted() -> list[str]:
    """Return the files that have conditions about GPUs, but no row in ROWS."""
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    return [name for name, file in files.items() if name not in ROWS and [*conditions(file)]]


def source_of(node: Any, lines: list[bytes]) -> str:
    """Return the source of a node; `ast.get_source_segment` splits the whole file for each."""
    part = lines[node.lineno - 1 : end(node)]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b"\n".join(part).decode()


def end(node: ast.stmt) -> int:
    """Return the last line of a statement."""
    return node.end_lineno or node.lineno


def executed(folder: Path, rows: list[str], python: str | None) -> dict[str, dict[str, list[int]]]:
    """Run rows under coverage; return its report by file."""
    data = {"COVERAGE_FILE": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | data
    coverage = [sys.executable, "-m", "coverage"]
    words = [*coverage, "run", *COMMAND, *rows, "--out", str(folder / "machine.json")]
    words += ["--sglang-python", python] if python else []
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    subprocess.run([*coverage, "combine", "-q", folder], cwd=ROOT, env=environment, check=True)
    report = folder / "report.json"
    words = [*coverage, "json", "-q", "-i", "-o", str(report)]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    return json.loads(report.read_text())["files"]


def main() -> int:
    """Print a table; return 1 if a condition is not reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "cuda_lines.json")
    parser.add_argument("--sglang-python", help="also run the rows of SGLang")
    options = parser.parse_args()
    rows = [row for row in dict.fromkeys(ROWS.values()) if "/" in row and ":" not in row]
    with tempfile.TemporaryDirectory() as folder:
        files = executed(Path(folder), ["reference", *rows], options.sglang_python)
    found, faults = list[Condition](), [f"{file} is not in ROWS" for file in unlisted()]
    for name, row in ROWS.items():
        report = files.get(f"arealite/{name}", {"executed_lines": [], "missing_lines": []})
        ran, missing = ({*report[key]} for key in ("executed_lines", "missing_lines"))
        nested = set[int]()
        for line, text, below in sorted(conditions(PACKAGE / name)):
            lines = sorted({*below} & missing)
            nested |= {*lines}
            found.append(Condition(f"arealite/{name}", line, text, lines, row))
            is_row = "/" in row and ":" not in row and "sglang" not in row
            if is_row and line not in ran | nested:
                faults.append(f"arealite/{name}:{line}: `{text}` is not evaluated by '{row}'")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    for each in found:
        name, count = each.file.removeprefix("arealite/"), len(each.lines) or "–"
        print(f"| `{name}` | `{each.text}` | {count} | {each.row} |")
    print(*faults, sep="\n", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
