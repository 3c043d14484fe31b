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
from arealite.base.trial_files import RunPaths
from arealite.ext.view import report_rows, report_run
from arealite.ext.view.report_text import Vocabulary

HERE = Path(__file__).parent
STYLES = (
    "vendor/uPlot.min.css",
    "report.css",
)
SCRIPTS = (
    "report_base.js",
    "report_tokens.js",
    "report_charts.js",
    "report_run.js",
    "report_detail.js",
    "report_browser.js",
)
"""Files of the report's scripts, in their order in the page, after uPlot."""


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
    run_files = (paths.config, paths.metrics, paths.ledger)
    if not any(file.exists() for file in run_files):
        raise UserError(f"{paths.root} is no run. Name its folder, as in runs/EXPERIMENT/TRIAL.")
    try:
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
            counts = _write(paths, file, most=most)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}. Name another file with --out.") from error
    return {**counts, "bytes": out.stat().st_size}


def read(paths: RunPaths, *, most: int) -> tuple[list[report_rows.TrajectoryRow], dict[str, Any]]:
    """Return at most `most` trajectories of a run, and all other data of its report."""
    run = report_run.describe(paths)
    rows = list[report_rows.TrajectoryRow]()
    num_trajectories = 0
    table = None
    if paths.ledger.exists():
        rows, num_trajectories = report_rows.choose(paths.ledger, most)
        table = report_rows.table(rows)
    page_data = {
        **run,
        "shown": len(rows),
        "trajectories": num_trajectories,
        "written": time.time(),
        "arealite": __version__,
        "table": table,
    }
    return rows, page_data


def _write(paths: RunPaths, file: TextIO, *, most: int) -> dict[str, int]:
    """Write the report into an open file; return the counts of `write_report` without "bytes"."""
    rows, page_data = read(paths, most=most)
    file.write(page(page_data["name"], page_data))
    chunks = report_rows.Chunks(paths)
    for number, chunk in enumerate(report_rows.cut(rows)):
        token_ids, tokens, turns = chunks.pack(chunk)
        file.write(block(f"t{number}", token_ids))
        file.write(block(f"x{number}", tokens))
        file.write(block(f"r{number}", turns))
    vocabulary = Vocabulary.find(model_folders(paths))
    file.write(block("end", words(chunks, vocabulary)))
    file.write("</body></html>\n")
    return {
        "shown": page_data["shown"],
        "trajectories": page_data["trajectories"],
    }


def words(chunks: report_rows.Chunks, vocabulary: Vocabulary) -> dict[str, object]:
    """Return the pieces of the packed tokens, and the number of unreadable payloads."""
    return {
        "vocabulary": vocabulary.table(chunks.ids),
        "unreadable": chunks.unreadable,
    }


def page(name: str, page_data: dict[str, object], *, connects: str = "'none'") -> str:
    """Return the page up to where its tokens begin; `connects` is its policy's connect-src."""
    style = "\n".join(map(_read, STYLES))
    script = _script()
    policy = "; ".join(
        (
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            f"connect-src {connects}",
            f"style-src 'sha256-{_base64_sha256(style)}'",
            f"script-src 'sha256-{_base64_sha256(script)}'",
        )
    )
    template = Template(_read("report.html"))
    return template.substitute(
        policy=policy,
        title=escape(name),
        about=block("about", page_data),
        style=style,
        script=script,
    )


def _script() -> str:
    """Return uPlot with its license, and the report's scripts in one function."""
    uplot_license = _read("vendor/uPlot.LICENSE")
    uplot = _read("vendor/uPlot.iife.min.js")
    scripts = "\n".join(map(_read, SCRIPTS))
    return f'/* {uplot_license} */\n{uplot}\n"use strict";\n(() => {{\n{scripts}\n}})();\n'


def _base64_sha256(source: str) -> str:
    """Return the hash of a style or script as a content security policy names it."""
    digest = sha256(source.encode()).digest()
    return b64encode(digest).decode()


def _read(file: str) -> str:
    """Return the content of a file of this folder."""
    return (HERE / file).read_text("utf-8")


def block(name: str, content: bytes | dict[str, object]) -> str:
    """Return compressed bytes or JSON as an element that no browser runs or shows."""
    encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
    compressed = zlib.compress(encoded, 4)
    packed = b64encode(compressed).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>\n'


def model_folders(paths: RunPaths) -> list[Path]:
    """List the folders where the run's tokenizer may be: the first model's, the exported one's."""
    folders = list[Path]()
    if paths.config.exists():
        config = base_config.read_saved(paths.config)
        model_path = (config.get("model") or {}).get("path")
        if model_path:
            folders.append(Path(model_path))
    folders.append(paths.export)
    return folders
