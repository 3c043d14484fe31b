"""Check the size limits of CONTRIBUTING.md; prints each breach and exits 1 if there is one.

Readable code decays because nobody measures it; this does, on every run of CI.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE_LINES, FUNCTION_LINES, API_LINES, YAML_LINES, EXAMPLE_LINES = 400, 60, 150, 80, 100
CONFIG_FIELDS, TREE_KEYS, TRAIN_LINES = 20, 230, 45
TOTAL_CODE, CORE_CODE = 34_305, 28_475
"""Lines of code of the package, and without PARTS. The goal of 16,000 and 11,500 is not reached."""
LONGER_EXAMPLES = {"rl_loop.py": 200}
"""The whole loop, in one file."""

READING_PATH = (
    "algo/staleness.py",
    "system/datapipe/group_store.py",
    "impl/rollout/worker.py",
    "impl/rollout/collector.py",
    "api/agent.py",
    "impl/client/sglang.py",
    "impl/server/engine.py",
    "impl/trainer/ppo.py",
    "impl/trainer/batch.py",
    "impl/trainer/batch_advantages.py",
    "algo/losses.py",
    "impl/engine/fsdp.py",
    "impl/publisher/servers.py",
    "impl/publisher/disk.py",
)
"""Files between a prompt and the updated weights, in the order of docs/architecture.md."""
PATH_FILES, PATH_CODE = 14, 2_400

PARTS = ("agent", "env", "tool", "sandbox", "browser", "env_server", "env_client")
"""Folders of impl with environments, agents, tools, and what serves them."""
WEB = (".js", ".css", ".html")
VENDOR = "vendor"
"""Folders with files of other projects, which are not counted."""
OF_PARTS = (".collector.env.", ".collector.agent.")
"""Keys that are options of one of several implementations: only the fields of each are limited."""


def main() -> int:
    """Measure the tree; return 1 if a limit is broken."""
    sys.path.insert(0, str(ROOT))
    package = sorted((ROOT / "arealite").rglob("*.py"))
    breaches = [
        b for file in [*package, *sorted((ROOT / "tools").glob("*.py"))] for b in module(file)
    ]
    breaches += [
        b for file in sorted((ROOT / "config").rglob("*.yaml")) for b in lines(file, YAML_LINES)
    ]
    breaches += [
        b for file in sorted((ROOT / "arealite/api").glob("*.py")) for b in lines(file, API_LINES)
    ]
    breaches += [
        b
        for file in sorted((ROOT / "examples").glob("*.py"))
        for b in lines(file, LONGER_EXAMPLES.get(file.name, EXAMPLE_LINES))
    ]
    breaches += [b for file in (ROOT / "arealite").glob("*.py") for b in shadows(file)]
    breaches += configs()
    counted = {file: code_lines(file) for file in [*package, *web_files()]}
    whole = sum(counted.values())
    folders = {ROOT / "arealite/impl" / name for name in PARTS}
    core = sum(n for file, n in counted.items() if not folders & {*file.parents})
    if whole > TOTAL_CODE:
        breaches.append(f"arealite/: {whole} lines of code, limit {TOTAL_CODE}")
    if core > CORE_CODE:
        breaches.append(f"the core of arealite/: {core} lines of code, limit {CORE_CODE}")
    path = sum(code_lines(ROOT / "arealite" / name) for name in READING_PATH)
    breaches += reading_path(path)
    total = sum(count(file) for file in package)
    tests = sum(count(file) for file in (ROOT / "tests").rglob("*.py"))
    for breach in breaches:
        print(breach)
    print(f"{whole} lines of code, core {core}; Python has {total} with docstrings and blanks")
    print(f"reading path {path} lines of code in {len(READING_PATH)} files")
    print(f"{len(package)} files, tests {tests} lines, {len(breaches)} breaches")
    return 1 if breaches else 0


def count(file: Path) -> int:
    """Count the lines of a file."""
    return len(file.read_text().splitlines())


def web_files() -> list[Path]:
    """Return the JavaScript, CSS and HTML of the package."""
    files = (ROOT / "arealite").rglob("*")
    return sorted(f for f in files if f.suffix in WEB and VENDOR not in f.parts)


def code_lines(file: Path) -> int:
    """Count the lines that are code: no blank, no comment, no docstring (as cloc counts).

    Comments in JavaScript, CSS and HTML count.
    """
    source = file.read_text()
    if file.suffix in WEB:
        return sum(bool(line.strip()) for line in source.splitlines())
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    prose = {n for s in strings for n in range(s.lineno, (s.end_lineno or s.lineno) + 1)}
    numbered = enumerate(source.splitlines(), 1)
    return sum(bool(x.strip()) and x.strip()[0] != "#" and n not in prose for n, x in numbered)


def lines(file: Path, limit: int) -> list[str]:
    """Check the length of one file."""
    found = count(file)
    return [f"{file.relative_to(ROOT)}: {found} lines, limit {limit}"] if found > limit else []


def module(file: Path) -> list[str]:
    """Check one module: its length, and that of its functions."""
    breaches = lines(file, MODULE_LINES)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = TRAIN_LINES if node.name == "train" else FUNCTION_LINES
            if length > limit:
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                breaches.append(f"{where}: {node.name} has {length} lines, limit {limit}")
    return breaches


def reading_path(code: int) -> list[str]:
    """Check the limits of the reading path, and that docs/architecture.md lists the same files."""
    breaches = list[str]()
    if code > PATH_CODE:
        breaches.append(f"the reading path: {code} lines of code, limit {PATH_CODE}")
    if len(READING_PATH) > PATH_FILES:
        breaches.append(f"the reading path: {len(READING_PATH)} files, limit {PATH_FILES}")
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("\n## Reading path\n")[2].partition("\n## ")[0]
    listed = tuple(re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE))
    if listed != READING_PATH:
        breaches.append("docs/architecture.md: its reading path differs from READING_PATH")
    return breaches


def shadows(file: Path) -> list[str]:
    """Check that no module beside launch_llm_server.py hides one of the standard library."""
    if file.stem in sys.stdlib_module_names:
        return [f"{file.relative_to(ROOT)}: named like a module of the standard library"]
    return []


def configs() -> list[str]:
    """Check the number of config fields, and that each key has its line of documentation."""
    from arealite.api.config import ExperimentConfig, ServerConfig
    from arealite.api.env_server import EnvServerConfig
    from arealite.base.config import keys, leaves

    breaches = []
    for root in (ExperimentConfig, ServerConfig, EnvServerConfig):
        every = list(keys(root))
        # A field of a dataclass that several options share, such as the optimizer's, counts once.
        shared = [(key, field) for key, field, _ in leaves(root)]
        own = {id(field) for key, field in shared if not any(part in key for part in OF_PARTS)}
        if len(own) > TREE_KEYS:
            breaches.append(f"{root.__name__}: {len(own)} keys, limit {TREE_KEYS}")
        breaches += [f"{root.__name__}: {key} has no help" for key, _, text in every if not text]
        groups: dict[str, int] = {}
        for key, _, _ in every:
            parent = key.rpartition(".")[0]
            groups[parent] = groups.get(parent, 0) + 1
        breaches += [f"{key}: {n} fields" for key, n in groups.items() if n > CONFIG_FIELDS]
    return breaches


if __name__ == "__main__":
    sys.exit(main())
