"""Writes the outcomes as out/models.json and as the table of docs/models.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JSON = ROOT / "out" / "models.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: made by make test-models WRITE=1 -->\n", "<!-- end of table -->\n"
COLUMNS: dict[str, tuple[str, ...]] = {
    "training, export": ("padded", "update", "export"),
    "packed rows": ("packed",),
    "FSDP2": ("sharded", "sharded update"),
    "embedded server": ("served", "shared"),
    "LoRA": ("lora",),
    "LoRA, attention": ("lora, attention",),
    "LoRA, all-linear": ("lora, all",),
}
"""The checks of each column."""
WORST = "silent", "crashed", "refused", "exact"
Rows = list[dict[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """Return the content of out/models.json."""
    counts = Counter(row["outcome"] for row in rows)
    families = {row["family"].partition(",")[0] for row in rows}
    totals = {name: counts[name] for name in reversed(WORST)}
    return {"families": len(families), **totals, "rows": rows}


def write_json(rows: Rows) -> None:
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(json.dumps(summary(rows), indent=1) + "\n")


def shown() -> str:
    """Return the table of docs/models.md."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write_page(rows: Rows) -> None:
    """Replace the table of docs/models.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])


def table(rows: Rows) -> str:
    """Return the Markdown table, and the numbered reasons below it."""
    notes: dict[str, int] = {}
    lines = [f"| family | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n"]
    for name in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == name]
        cells = [cell(mine, checks, notes) for checks in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    reasons = [f"{number}. {wrap(reason)}\n" for reason, number in notes.items()]
    return "".join(["\n", *lines, "\n", *reasons, "\n"])


def cell(rows: Rows, checks: tuple[str, ...], notes: dict[str, int]) -> str:
    """Return the worst outcome of the checks, with the number of its reason."""
    found = [row for row in rows if row["check"] in checks]
    worst = min(found, key=lambda row: WORST.index(row["outcome"]))
    if worst["outcome"] == "exact":
        return "exact"
    if worst["outcome"] != "refused":
        return f"**{worst['outcome']}**"
    return f"no [{notes.setdefault(reason(worst['why']), len(notes) + 1)}]"


def reason(why: str) -> str:
    """Return an error without the parts that differ from model to model."""
    why = re.sub(r"[\[{]'[^\]}]*'[\]}]", "…", why.splitlines()[0])
    why = re.sub(r"^\w+(?= (cannot be packed|has no `layers`|does not support))", "The model", why)
    why = re.sub(r"'[\w.]*layers\.\d+\.", "'layers.N.", why)
    why = re.sub(r": (\S+, )*\S+ \(\d+ in all\)", "", why.replace("'PATH'", "The folder"))
    return re.sub(r"https?://\S+", "", why)


def wrap(text: str, columns: int = 104) -> str:
    """Break a text into lines of a numbered list."""
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) >= columns:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n   ".join([*lines, line])
