"""Measure the time to write a report, and to open it in headless Chromium.

The opening time is from `goto` until the table and the curves are drawn.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.ext.view.report import write_report  # noqa: E402
from tests.ext.view.runs import add_token_stats, make_run, make_tokenizer, many, metrics  # noqa: E402
from tools import figures  # noqa: E402

TRAJECTORIES, REPEATS, WORDS = 10_000, 5, 32_000
SIZES = (14, 1000)
"""Tokens per trajectory: as in the demo, and as in a short answer with reasoning."""


def bench(browser: Any, tokens: int) -> dict[str, float]:
    """Write and open a report of TRAJECTORIES trajectories; return medians."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "run"
        make_tokenizer(root / "model", [f" w{number:x}" for number in range(WORDS)])
        drawn = lambda: many(TRAJECTORIES, tokens=tokens, words=WORDS)  # noqa: E731
        paths = make_run(root, drawn(), lines=metrics(80))
        add_token_stats(paths, drawn())
        begin = time.perf_counter()
        made = write_report(paths, paths.report, most=TRAJECTORIES)
        written, opened, found = time.perf_counter() - begin, list[float](), list[float]()
        for _ in range(REPEATS):
            page = browser.new_page()
            begin = time.perf_counter()
            page.goto(paths.report.as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-ready]", state="attached")
            opened.append(time.perf_counter() - begin)
            page.wait_for_load_state("load")
            begin = time.perf_counter()
            page.fill("[name=words]", " w7cff")
            page.wait_for_selector("output[data-busy=false]:has-text(' of ')")
            found.append(time.perf_counter() - begin)
            page.close()
    return {
        "tokens": tokens, "write_s": written, "mb": made["bytes"] / 1e6,
        "open_s": statistics.median(opened), "open_max_s": max(opened),
        "search_s": statistics.median(found),
        "peak_mb": figures.peak_mb(),
    }  # fmt: skip


def main() -> int:
    """Print a table and write out/bench/report.json."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium-headless-shell"))
        rows = [bench(browser, tokens) for tokens in SIZES]
        browser.close()
    print("".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>12.2f}" for value in row.values()))
    out = ROOT / "out/bench/report.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"trajectories": TRAJECTORIES, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
