"""Check the limits of size and density in CONTRIBUTING.md; exit 1 if the code breaks one.

Prints a table of the folders, then each breach. Limits are in tokens, because a limit in lines is
met by longer lines.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "arealite"
sys.path.insert(0, str(ROOT))

from tools import code_tokens  # noqa: E402
from tools.code_tokens import Counts  # noqa: E402

MODULE_TOKENS = 3400
FUNCTION_TOKENS = 500
API_TOKENS = 1300
YAML_LINES = 80
EXAMPLE_LINES = 100
TRAIN_LINES = 45
"""Lines of a trainer's `train()`, which must fit on one screen."""
WEB_LINES = 1250
"""Lines of JavaScript, CSS and HTML that are not blank."""
CONFIG_FIELDS = 20
TREE_KEYS = 230
TOTAL_TOKENS = 451_600
CORE_TOKENS = 133_700
"""Tokens outside arealite/ext."""
TOKENS_PER_LINE = 8.5
"""Largest density of a folder."""
FILLER_PERCENT = 1.0
TUPLE_ASSIGNMENTS_PER_1000 = 3.0

READING_PATH = (
    "algo/staleness.py",
    "system/datapipe/group_store.py",
    "system/datapipe/machine.py",
    "impl/rollout/worker.py",
    "impl/rollout/collector.py",
    "impl/rollout/tree_maker.py",
    "api/agent.py",
    "api/turns.py",
    "impl/client/servers_client.py",
    "ext/embedded/decode_loop.py",
    "api/trajectory_tree.py",
    "system/links/worker_link.py",
    "system/datapipe/message_checks.py",
    "system/ledger/ledger.py",
    "system/links/trainer_link.py",
    "impl/trainer/ppo.py",
    "impl/trainer/batch.py",
    "impl/trainer/batch_advantages.py",
    "algo/losses.py",
    "impl/engine/micro_batches.py",
    "impl/engine/fsdp.py",
    "impl/publisher/servers.py",
    "impl/publisher/disk.py",
)
"""All files between a prompt and the updated weights, in the order of docs/architecture.md."""
PATH_TOKENS = 41_200

REPEATED_MODULES = ("__init__", "command", "config", "env")
"""Names that each folder may give to one of its modules."""
WEB = (".js", ".css", ".html")
VENDOR = "vendor"
"""Folders with files of other projects, which are not counted."""
OF_PARTS = (".collector.env.", ".collector.agent.")
"""Keys that are options of one of several implementations: only the fields of each are limited."""


def main() -> int:
    """Measure the tree; return 1 if a limit is broken."""
    counts_of_file = {file: code_tokens.count(file.read_text("utf-8")) for file in python_files()}
    breaches = [breach for file in counts_of_file for breach in module(file)]
    breaches += [breach for file in tool_files() for breach in module(file)]
    breaches += yaml_and_examples()
    breaches += density(counts_of_file)
    breaches += totals(counts_of_file)
    breaches += reading_path(counts_of_file)
    breaches += [breach for file in PACKAGE.glob("*.py") for breach in shadows(file)]
    breaches += repeated_names(python_files())
    breaches += configs()
    for breach in breaches:
        print(breach)
    print(f"{len(counts_of_file)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


def python_files() -> list[Path]:
    """Return the modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def tool_files() -> list[Path]:
    """Return the scripts of the project."""
    return sorted((ROOT / "tools").rglob("*.py"))


def module(file: Path) -> list[str]:
    """Check the size of one module, and of its functions."""
    source = file.read_text("utf-8")
    tokens_of_line = code_tokens.tokens_by_line(source)
    name = str(file.relative_to(ROOT))
    limit = API_TOKENS if file.is_relative_to(PACKAGE / "api") else MODULE_TOKENS
    breaches = over(name, sum(tokens_of_line.values()), limit, "tokens")
    for function in code_tokens.functions(source):
        tokens = code_tokens.tokens_within(function, tokens_of_line)
        place = f"{name}:{function.lineno}: {function.name}"
        breaches += over(place, tokens, FUNCTION_TOKENS, "tokens")
        if function.name == "train" and file.is_relative_to(PACKAGE / "impl/trainer"):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            breaches += over(place, lines, TRAIN_LINES, "lines")
    return breaches


def over(name: str, size: float, limit: float, unit: str) -> list[str]:
    """Return a breach if `size` is above its limit."""
    return [f"{name}: {size:g} {unit}, limit {limit:g}"] if size > limit else []


def yaml_and_examples() -> list[str]:
    """Check the files whose limits are in lines, because users read them as a whole."""
    breaches = list[str]()
    limits = dict.fromkeys(sorted((ROOT / "config").rglob("*.yaml")), YAML_LINES)
    for example in sorted((ROOT / "examples").glob("*.py")):
        limits[example] = EXAMPLE_LINES
    for file, limit in limits.items():
        lines = len(file.read_text("utf-8").splitlines())
        breaches += over(str(file.relative_to(ROOT)), lines, limit, "lines")
    return breaches


def density(counts_of_file: dict[Path, Counts]) -> list[str]:
    """Print a table of the folders; check tokens per line, filler names and tuple assignments."""
    counts_of_folder = defaultdict[str, Counts](Counts)
    for file, counts in counts_of_file.items():
        counts_of_folder[str(file.parent.relative_to(ROOT))] += counts
    print("tokens   per line   filler names   folder")
    breaches = list[str]()
    for folder, counts in sorted(counts_of_folder.items()):
        per_line = round(counts.tokens_per_line, 1)
        print(f"{counts.tokens:6}   {per_line:8.1f}   {counts.filler_percent:10.1f} %   {folder}")
        breaches += over(folder, per_line, TOKENS_PER_LINE, "tokens per line")
    whole = sum(counts_of_file.values(), Counts())
    fillers = round(whole.filler_percent, 1)
    tuples = round(whole.tuple_assignments_per_1000, 1)
    print(
        f"{whole.tokens} tokens, {whole.tokens_per_line:.1f} per line, {fillers} % filler names, "
        f"{tuples} tuple assignments per 1,000 lines"
    )
    breaches += over("arealite", fillers, FILLER_PERCENT, "% filler names")
    unit = "tuple assignments per 1,000 lines"
    return breaches + over("arealite", tuples, TUPLE_ASSIGNMENTS_PER_1000, unit)


def totals(counts_of_file: dict[Path, Counts]) -> list[str]:
    """Print and check the size of the package, of its core, and of its web pages."""
    tokens_of_extension = Counter[str]()
    core = 0
    for file, counts in counts_of_file.items():
        if file.is_relative_to(PACKAGE / "ext"):
            tokens_of_extension[extension_of(file)] += counts.tokens
        else:
            core += counts.tokens
    whole = core + tokens_of_extension.total()
    web = sum(map(web_lines, PACKAGE.rglob("*")))
    sizes = [f"{name} {tokens}" for name, tokens in sorted(tokens_of_extension.items())]
    print(f"the extensions have {tokens_of_extension.total()} tokens: {', '.join(sizes)}")
    print(f"the core has {core} tokens, JavaScript, CSS and HTML have {web} lines")
    breaches = over("arealite", whole, TOTAL_TOKENS, "tokens")
    breaches += over("the core of arealite", core, CORE_TOKENS, "tokens")
    return breaches + over("JavaScript, CSS and HTML", web, WEB_LINES, "lines")


def extension_of(file: Path) -> str:
    """Return the name of the extension that a module below arealite/ext belongs to."""
    folders = file.relative_to(PACKAGE / "ext").parts[:-1]
    return folders[0] if folders else "ext"


def web_lines(file: Path) -> int:
    """Return the lines of a JavaScript, CSS or HTML file that are not blank; 0 for other files."""
    if file.suffix not in WEB or VENDOR in file.parts:
        return 0
    return sum(bool(line.strip()) for line in file.read_text("utf-8").splitlines())


def reading_path(counts_of_file: dict[Path, Counts]) -> list[str]:
    """Check the reading path, and that docs/architecture.md lists the same files."""
    tokens = sum(counts_of_file[PACKAGE / name].tokens for name in READING_PATH)
    print(f"the reading path has {tokens} tokens in {len(READING_PATH)} files")
    breaches = over("the reading path", tokens, PATH_TOKENS, "tokens")
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.partition("\n## Reading path\n")[2].partition("\n## ")[0]
    listed = tuple(re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE))
    if listed != READING_PATH:
        breaches.append("docs/architecture.md: its reading path differs from READING_PATH")
    return breaches


def repeated_names(files: list[Path]) -> list[str]:
    """Check that classes, aliases of types and modules have different names."""
    places_of_name = defaultdict[str, list[str]](list)
    for file in files:
        path = str(file.relative_to(ROOT))
        if file.stem not in REPEATED_MODULES:
            places_of_name[f"module {file.stem}"].append(path)
        for name, line in type_names(file.read_text("utf-8")):
            places_of_name[f"class {name}"].append(f"{path}:{line}")
    return [
        f"{name}: {len(places)} times, limit 1: {', '.join(places)}"
        for name, places in sorted(places_of_name.items())
        if len(places) > 1
    ]


def type_names(source: str) -> Iterator[tuple[str, int]]:
    """Yield name and line of each class, and of each alias such as `Row = dict[str, int]`."""
    nodes = code_tokens.nodes_of(source)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    module = nodes[0]
    assert isinstance(module, ast.Module)
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
                if name[0].isupper() and not name.isupper():
                    yield name, statement.lineno
            case _:
                pass


def shadows(file: Path) -> list[str]:
    """Check that no module beside launch_llm_server.py hides one of the standard library."""
    if file.stem in sys.stdlib_module_names:
        return [f"{file.relative_to(ROOT)}: named like a module of the standard library"]
    return []


def configs() -> list[str]:
    """Check the number of config fields, and that each key has its line of documentation."""
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig
    from arealite.base.config_tree import keys, leaves
    from arealite.ext.hosting.server_config import EnvServerConfig

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
