"""Writes the report of a run: one HTML file that needs neither network nor server.

The page, the table and the curves come first in the file and the tokens last, so that a browser
draws a large report at once. The text of trajectories is untrusted: the file holds it as compressed
bytes only, and the page's policy allows no script but its own.
"""

import time
import zlib
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any, TextIO

import msgspec

from arealite import __version__
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.files import replacing
from arealite.base.names import RunPaths
from arealite.impl.view import report_rows, report_run
from arealite.impl.view.report_text import Vocabulary, id_table

HERE = Path(__file__).parent
STYLES = "vendor/uPlot.min.css", "report.css"
SCRIPTS = "base", "tokens", "charts", "run", "detail", "browser"
"""report_<name>.js, in their order in the page, after uPlot."""


def write_report(paths: RunPaths, out: Path, *, most: int) -> dict[str, int]:
    """Write the report of a finished or running run.

    Args:
        paths: The run's files.
        out: The file to write.
        most: Maximum number of trajectories in the report.

    Returns:
        The number of trajectories "shown", of all "trajectories", and the file's "bytes".

    Raises:
        UserError: The folder is not a run's, or the file cannot be written.
    """
    if not (paths.config.exists() or paths.metrics.exists() or paths.ledger.exists()):
        raise UserError(f"{paths.root} is no run. Name its folder, as in runs/EXPERIMENT/TRIAL.")
    try:
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
            counts = _write(paths, file, most=most)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}. Name another file with --out.") from error
    return {**counts, "bytes": out.stat().st_size}


def read(paths: RunPaths, *, most: int) -> tuple[list[report_rows.Row], dict[str, Any]]:
    """Return at most `most` trajectories of a run, and all other data of its report."""
    run = report_run.describe(paths)
    has_ledger = paths.ledger.exists()
    rows, total = report_rows.choose(paths.ledger, most) if has_ledger else ([], 0)
    table = report_rows.table(rows) if has_ledger else None
    now = {"written": time.time(), "arealite": __version__, "table": table}
    return rows, {**run, "shown": len(rows), "trajectories": total, **now}


def _write(paths: RunPaths, file: TextIO, *, most: int) -> dict[str, int]:
    rows, about = read(paths, most=most)
    file.write(page(about["name"], about))
    chunks = report_rows.Chunks(paths)
    for number, chunk in enumerate(report_rows.cut(rows)):
        for name, packed in zip("txr", chunks.pack(chunk), strict=True):
            file.write(block(f"{name}{number}", packed))
    file.write(block("end", words(chunks, Vocabulary.find(model_folders(paths)))))
    file.write("</body></html>\n")
    return {name: about[name] for name in ("shown", "trajectories")}


def words(chunks: report_rows.Chunks, vocabulary: Vocabulary | None) -> dict[str, object]:
    """Return the pieces of the packed tokens, and the number of unreadable payloads."""
    pieces = vocabulary.table(chunks.ids) if vocabulary else id_table(chunks.ids)
    return {"vocabulary": pieces, "unreadable": chunks.unreadable}


def page(name: str, about: dict[str, object], *, connects: str = "'none'") -> str:
    """Return the page up to where its tokens begin; `connects` is its policy's connect-src."""
    style = "\n".join(_text(file) for file in STYLES)
    own = "\n".join(_text(f"report_{script}.js") for script in SCRIPTS)
    uplot = f"/* {_text('vendor/uPlot.LICENSE')} */\n{_text('vendor/uPlot.iife.min.js')}"
    script = f'{uplot}\n"use strict";\n(() => {{\n{own}\n}})();\n'
    allowed = {"style-src": style, "script-src": script}
    hashes = {k: b64encode(sha256(v.encode()).digest()).decode() for k, v in allowed.items()}
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; connect-src {connects}; "
    policy += "; ".join(f"{k} 'sha256-{v}'" for k, v in hashes.items())
    texts = {"policy": policy, "title": escape(name), "about": block("about", about)}
    return Template(_text("report.html")).substitute(texts, style=style, script=script)


def _text(file: str) -> str:
    return (HERE / file).read_text("utf-8")


def block(name: str, data: bytes | dict[str, object]) -> str:
    """Return compressed data as an element that no browser runs or shows."""
    raw = data if isinstance(data, bytes) else msgspec.json.encode(data)
    packed = b64encode(zlib.compress(raw, 4)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>\n'


def model_folders(paths: RunPaths) -> list[Path]:
    """List the folders where the run's tokenizer may be: the first model's, the exported one's."""
    config = base_config.read_saved(paths.config) if paths.config.exists() else {}
    model = (config.get("model") or {}).get("path")
    return [*([Path(model)] if model else []), paths.export]
