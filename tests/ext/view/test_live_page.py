"""The live page in real Chromium: new steps appear without a reload; the reader stays in place."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from arealite.base.trial_files import RunPaths
from tests.ext.view.runs import (
    Trajectory,
    add_lines,
    add_trajectories,
    make_run,
    make_tokenizer,
    metrics,
)
from tests.ext.web.browser.sites import needs_chromium
from tests.impl.trainer.trajectories import header, segment
from tests.waiting import spawned

pytestmark = [pytest.mark.processes, needs_chromium]

PATIENCE_MS = 120_000.0
WORDS = ["question ", "answer ", "other "]
LINES = metrics(4)


def group(step: int | None, number: int, word: int) -> Iterator[Trajectory]:
    """Yield a group of two trajectories, whose text ends with a word."""
    for member in range(2):
        said = [segment([0, word], sampled=1, version=step or 0, reward=float(member))]
        yield step, header(f"g{number}/{member}/agent", said, reward=float(member)), said


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Return a run with an evaluation and a step, and 40 trajectories; two are untrained."""
    make_tokenizer(tmp_path / "run/model", WORDS)
    trained = [each for number in range(19) for each in group(0, number, 2)]
    return make_run(tmp_path / "run", [*trained, *group(None, 19, 1)], lines=LINES[:2])


@contextmanager
def live_page(paths: RunPaths, **context: Any) -> Iterator[Any]:
    """Open the live page of a run in a browser; an error of the page fails the test."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "arealite.cli.main", "top", str(paths.root), "--web"]
    with spawned(command, os.environ) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("live page: ").strip()
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), timeout=PATIENCE_MS
        )
        page = chromium.new_context(**context).new_page()
        page.set_default_timeout(PATIENCE_MS)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#state > span")
        yield page
        chromium.close()
        assert wrong == []


def steps(page: Any, count: int) -> None:
    """Wait until the page shows a number of steps."""
    page.locator("#head .tiles div").first.locator("b", has_text=str(count)).wait_for()


def test_new_step_appears_without_a_reload_and_the_place_stays(paths: RunPaths) -> None:
    with live_page(paths) as page:
        steps(page, 1)
        page.evaluate("window.stayed = true")
        page.locator("#metrics summary", has_text="Reward").click()
        page.fill("[name=words]", "answer")
        page.locator("output[data-busy=false]", has_text="2 of 40").wait_for()
        page.locator("#grid [data-row='39']").click()
        page.wait_for_selector("#detail[data-row='39']")
        page.evaluate("scrollTo(0, 500)")
        charts = page.locator("#curves .card").count()
        add_trajectories(paths, [*group(1, 20, 1), *group(1, 21, 2)], first=20)
        add_lines(paths, LINES[2:3])
        steps(page, 2)
        page.wait_for_selector("#detail[data-row='43']")
        assert page.evaluate("[window.stayed, scrollY]") == [True, 500]
        assert page.input_value("[name=words]") == "answer"
        page.locator("output[data-busy=false]", has_text="4 of 44").wait_for()
        assert page.locator("#grid [aria-selected=true]").get_attribute("data-row") == "43"
        assert page.inner_text("#detail h3") == "g19/1/agent"
        assert page.locator("#detail .words").last.inner_text().strip() == "answer"
        assert page.locator("#metrics details[open]").count() == 1
        assert page.locator("#curves .card").count() == charts
        legend = page.locator("#curves .card").first.inner_text()
        assert "2" in legend and "0.25" in legend
        page.locator("#grid [data-row='38']").click()
        page.wait_for_selector("#detail[data-row='38']")
        assert page.inner_text("#detail h3") == "g20/0/agent"


def test_page_before_step_1_fills_as_the_run_begins(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "run/model", WORDS)
    paths = make_run(tmp_path / "run", [])
    paths.ledger.unlink()
    with live_page(paths) as page:
        steps(page, 0)
        assert page.locator("#curves:visible, #trajectories:visible").count() == 0
        add_trajectories(paths, group(None, 0, 1))
        page.locator("#grid [data-row='1']").wait_for()
        add_trajectories(paths, group(0, 1, 2), first=1)
        add_lines(paths, LINES[:2])
        steps(page, 1)
        assert page.locator("#curves .card:visible").count() > 3
        page.locator("#grid [data-row='3']").click()
        page.wait_for_selector("#detail[data-row='3']")
        assert page.inner_text("#detail h3") == "g0/1/agent"


def test_page_shows_the_end_of_its_server(paths: RunPaths) -> None:
    with live_page(paths) as page:
        steps(page, 1)
        page.evaluate("() => { window.fetch = () => Promise.reject(new Error('gone')) }")
        page.locator("#state", has_text="has ended").wait_for()
        assert page.locator("#curves .card").first.is_visible()
