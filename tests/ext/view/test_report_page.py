"""The report in real Chromium, without a network: content, filters, selection and colours."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from arealite.api.episode import Origin
from arealite.base.trial_files import RunPaths
from arealite.ext.step_metrics import token_stats_store as token_stats
from arealite.ext.step_metrics.token_stats_store import TokenStats
from arealite.ext.view import report_rows
from arealite.ext.view.report import write_report
from tests.ext.view.runs import (
    add_failure,
    branched_header,
    branched_session,
    make_run,
    make_tokenizer,
    many,
    metrics,
)
from tests.ext.web.browser.sites import needs_chromium
from tests.impl.trainer.trajectories import header, segment

pytestmark = [pytest.mark.processes, needs_chromium]

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>"
ODD = "\u202eabc\u0000\ufeff\u2028"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
WORDS = [
    "user", "assistant", "\n", "tool", "Hello ", "wörld", "☕".encode()[:1], "☕".encode()[1:],
    CALL, "four", HOSTILE, ODD, "<tool_call>{never closed", b"\xff",
]  # fmt: skip

LABELS = {"time": "Work, seconds", "throughput": "Throughput", "episode": "Episodes"}
"""Titles of groups of metrics."""
PATIENCE_MS = 120_000.0

Open = Callable[..., AbstractContextManager[Any]]


def talk(ids: dict[Any, int], *words: str | bytes) -> list[int]:
    return [ids[word] for word in words]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Two groups at steps 2 and 3: chats with a tool, of two versions; and hostile text."""
    ids = make_tokenizer(tmp_path / "run/model", WORDS)
    start, end = "<|im_start|>", "<|im_end|>"
    asked = talk(ids, start, "user", "\n", "Hello ", "wörld", end, "\n", start, "assistant", "\n")
    said = talk(ids, CALL, end)
    heard = talk(ids, "\n", start, "tool", "\n", "four", end, start, "assistant", "\n")
    then = talk(ids, *WORDS[6:8], "four", end)
    tokens = asked + said + heard + then
    mask = [0] * len(asked) + [1] * 2 + [0] * len(heard) + [1] * 4
    versions = np.where(mask, np.arange(len(mask)) >= len(asked) + 2, -1)
    changes = {
        "loss_mask": bytes(mask),
        "logprobs": (np.array(mask) * np.linspace(-3.0, -0.1, len(mask))).astype("<f4").tobytes(),
        "versions": versions.astype("<i4").tobytes(),
        "temperature": 1.0,
    }
    chats = {
        reward: replace(segment(tokens, sampled=0, reward=reward), **changes)
        for reward in (1.5, 0.0, 9.0)
    }
    odd = segment(
        talk(ids, "user", HOSTILE, ODD, WORDS[12], WORDS[13]), sampled=4, version=1, reward=-0.5
    )
    made = []
    for member, reward in enumerate((1.5, 0.0)):
        name, said = f"g0/{member}/agent", [chats[reward]]
        parts = {"right": reward, "form": 0.25}
        about = header(name, said, reward=reward, reward_parts=parts, turns=2, source="tools")
        made.append((1, about, said))
    for member in range(2):
        made.append((2, header(f"g1/{member}/guest", [odd], reward=-0.5, source="odd"), [odd]))
    said = [chats[9.0]]
    made.append((None, header("g2/0/agent", said, reward=9.0, source="tools"), said))
    paths = make_run(tmp_path / "run", made, lines=metrics(3))
    for step, ids_, count in ((1, ["g0/0/agent"], 6),):
        half = np.linspace(-1, 1, count).astype("<f2")
        token_stats.write(
            paths.token_stats,
            step,
            0,
            TokenStats(
                trajectory_ids=ids_,
                counts=[count],
                advantages=half.tobytes(),
                differences=half.tobytes(),
            ),
        )
    return paths


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return one Chromium for all tests; each test has its own context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), timeout=PATIENCE_MS
        )
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Open:
    """Open reports without a network; an error of the page fails the test."""

    @contextmanager
    def opened(file: Path, **context: Any) -> Iterator[Any]:
        own = browser.new_context(offline=True, **context)
        own.set_default_timeout(PATIENCE_MS)
        page = own.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda it: wrong.extend([it.url] * (it.url != file.as_uri())))
        page.goto(file.as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
        own.close()
        assert wrong == []

    return opened


def texts(page: Any, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def pixels(card: Any, colour: str) -> int:
    """Count the pixels of a chart that have a colour, as the browser writes it: rgb(1, 2, 3)."""
    return card.locator("canvas").evaluate(
        """(canvas, colour) => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const wanted = colour.match(/\\d+/g).map(Number);
            let found = 0;
            for (let at = 0; at < data.length; at += 4) {
                if (wanted.every((value, i) => Math.abs(value - data[at + i]) < 9)) found++;
            }
            return found;
        }""",
        colour,
    )


def test_content_of_the_page(paths: RunPaths, opened: Open) -> None:
    add_failure(paths, "g0", HOSTILE)
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        assert texts(page, "nav a") == [
            "Curves", "Time by part", "Weights", "Trajectories", "Ledger",
            "Every metric", "Config",
        ]  # fmt: skip
        assert "balanced" in page.inner_text("#head")
        titles = texts(page, "#curves figcaption")
        assert titles[:2] == ["Reward", "Staleness, versions"]
        reward = page.locator("#curves .card").first
        evaluation = reward.locator(".u-series", has_text="held-out")
        assert evaluation.locator(".u-value").inner_text() == "0.25"
        colour = evaluation.evaluate("e => getComputedStyle(e).color")
        assert pixels(reward, colour) > 5  # its point
        roles = {}
        for role in page.locator(".role").all():
            shares = role.locator("[data-share]").all_inner_texts()
            roles[role.get_attribute("data-role")] = sum(float(s.split()[0]) for s in shares)
        assert set(roles) == {"trainer", "episodes", "workers", "datapipe", "servers"}
        assert all(total == pytest.approx(100.0, abs=1e-9) for total in roles.values())
        balance = page.inner_text("#ledger")
        assert HOSTILE in balance
        assert "Lost: nothing" in balance
        page.locator("#metrics summary", has_text="Reward").click()
        title = page.locator("#metrics figcaption", has_text="reward/mean")
        assert "before shaping" in (title.get_attribute("title") or "")
        assert "max_staleness" in page.inner_text("#config pre")


def test_hovering_shows_the_value_in_every_chart(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        box = page.locator("#curves .u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 2 / 3, box["y"] + box["height"] / 2)
        steps = "#curves .u-series:first-child .u-value"
        page.locator(steps, has_text="2").first.wait_for()
        assert set(texts(page, steps)) == {"2"}
        assert "0.3333" in page.locator("#curves .u-legend").first.inner_text()


def test_trajectory_is_shown_turn_by_turn(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")
        detail = page.locator("#detail")
        assert texts(page, "#detail h3") == ["g0/0/agent"]
        assert (texts(page, "#detail .reward .chip")) == ["right 1.5", "form 0.25"]
        roles = [b.get_attribute("data-role") for b in detail.locator(".block").all()]
        assert roles == ["user", "policy", "observed", "tool", "policy"]
        assert texts(page, "#detail .call") == ['add {"a":2}']
        words = detail.locator(".words").evaluate_all("all => all.map(e => e.textContent)")
        assert words[0] == "<|im_start|>user\nHello wörld<|im_end|>\n"
        assert words[4] == "<|im_start|>assistant\n☕four<|im_end|>"
        tokens = detail.locator(".block").nth(4).locator(".token")
        assert tokens.evaluate_all("all => all.map(e => e.textContent)") == [
            "<|im_start|>", "assistant", "\n", "", "☕", "four", "<|im_end|>",
        ]  # fmt: skip
        assert tokens.nth(3).evaluate("e => e.classList.contains('partial')")
        assert tokens.nth(6).get_attribute("data-reward") == "+1.5"
        assert texts(page, "#detail .group button") == ["1.5", "0"]
        page.locator("#detail .group button").nth(1).click()
        page.wait_for_selector("#detail[data-row='1']")
        assert page.locator("#grid [aria-selected=true]").get_attribute("data-row") == "1"


def test_colours_match_the_tooltip(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")

        def colours() -> list[str]:
            return page.locator(".token").evaluate_all(
                "all => all.map(e => e.style.backgroundColor)"
            )

        by_version = colours()
        sampled = [colour for colour in by_version if colour]
        assert len(sampled) == 6
        assert len(set(sampled)) == 2  # versions 0 and 1
        assert texts(page, "#legend .chip") == ["version 0: 2 tokens", "version 1: 4 tokens"]
        for mode in ("advantages", "differences", "logprobs"):
            page.check(f"[value={mode}]")
            assert len({colour for colour in colours() if colour}) == 6
        page.check("[value=none]")
        assert not any(colours())
        page.locator(".token.sampled").last.hover()
        page.wait_for_selector("#tip")  # visible
        tip = page.inner_text("#tip")
        assert tip.split("\n") == [
            "token", '"<|im_end|>"', "id", "15", "version", "1", "logprob", "−0.1 (90.5 %)",
            "advantage", "1", "trainer − sampler", "1", "reward here", "1.5",
        ]  # fmt: skip
        page.locator("#grid [data-row]").nth(1).click()
        page.wait_for_selector("#detail[data-row='1']")
        page.check("[value=advantages]")
        assert "Not kept" in page.inner_text("#legend")


def test_hostile_text_is_not_executed(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").nth(2).click()
        page.wait_for_selector("#detail[data-row='2']")
        shown = page.locator("#detail .words").evaluate_all("all => all.map(e => e.textContent)")
        assert "".join(shown) == "user" + HOSTILE + ODD + "<tool_call>{never closed" + "\ufffd"
        assert page.locator("#detail img").count() == 0
        assert page.title() == f"{paths.root.parent.name}/run · AReaLite report"
        assert texts(page, "#detail .call")[0].startswith("malformed call: {never closed")


def test_filters_sorting_and_keys(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:

        def rows() -> list[str]:
            return texts(page, "#grid .trajectory")

        every = ["g0/0/agent", "g0/1/agent", "g1/0/guest", "g1/1/guest"]
        assert rows() == [*every, "g2/0/agent"]
        page.select_option("[name=state]", label="filtered")
        assert rows() == ["g2/0/agent"]
        page.select_option("[name=state]", label="trained")
        for name, value, left in (
            ("reward-from", "1", every[:1]), ("reward-to", "-0.1", every[2:]),
            ("step-from", "3", every[2:]), ("step-to", "2", every[:2]),
        ):  # fmt: skip
            page.fill(f"[name={name}]", value)
            assert rows() == left
            page.fill(f"[name={name}]", "")
        for name, label in (("source", "odd"), ("seat", "guest")):
            page.select_option(f"[name={name}]", label=label)
            assert rows() == every[2:]
            assert "2 of 5" in page.inner_text("output")
            page.select_option(f"[name={name}]", label="all")
        for words, left in (
            ("HELLO WÖRLD", every[:2]),
            ("☕four", every[:2]),
            ("g1/1", every[3:]),
            ("zzz", []),
        ):
            page.fill("[name=words]", words)
            page.wait_for_selector("output[data-busy=false]", state="attached")
            assert rows() == left
        page.click("[type=reset]")
        page.locator("output", has_text="5 trajectories").wait_for()
        page.fill("[name=step-from]", "0")
        page.locator("#grid th button", has_text="reward").click()
        assert (rows())[0] == "g0/0/agent"
        page.locator("#grid th button", has_text="reward").click()
        assert rows() == ["g1/0/guest", "g1/1/guest", "g0/1/agent", "g0/0/agent"]
        for key, row in (("j", 2), ("ArrowDown", 3), ("k", 2), ("End", 0), ("ArrowUp", 1)):
            page.keyboard.press(key)
            page.wait_for_selector(f"#detail[data-row='{row}']")


def test_clear_ends_sorting_and_filters(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        every = texts(page, "#grid .trajectory")
        page.locator("#grid th button", has_text="reward").click()
        page.fill("[name=reward-to]", "2")
        assert texts(page, "#grid .trajectory") == [every[0], every[1], *every[2:4]]
        page.locator("#grid th button", has_text="reward").click()
        assert texts(page, "#grid .trajectory") != every[:4]
        page.click("[type=reset]")
        page.locator("output", has_text="5 trajectories").wait_for()
        assert texts(page, "#grid .trajectory") == every
        sorted_by = page.locator("#grid th").evaluate_all(
            "all => all.map((each) => each.getAttribute('aria-sort'))"
        )
        assert set(sorted_by) <= {"none", None}


def test_filtered_trajectory_is_not_shown(paths: RunPaths, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")
        page.fill("[name=reward-from]", "1")  # the trajectory is among the remaining ones
        assert page.locator("#detail[data-row='0']").count() == 1
        page.fill("[name=reward-from]", "100")
        assert texts(page, "#grid [data-row]") == []
        assert page.inner_text("#detail") == "No trajectory matches the filters."
        page.click("[type=reset]")
        page.locator("output", has_text="5 trajectories").wait_for()
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")
        page.fill("[name=words]", "g1/1")
        page.wait_for_selector("output[data-busy=false]", state="attached")
        assert "does not match the filters" in page.inner_text("#detail")
        assert page.locator("#detail[data-row]").count() == 0
        page.keyboard.press("Tab")
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='3']")


def test_seconds_have_a_unit_that_fits(paths: RunPaths, opened: Open) -> None:
    seconds = {
        0.0: "0 s", 3.18e-8: "0 s", 3.18e-5: "32 µs", 0.0421: "42 ms", 1.234: "1.23 s",
        42.37: "42.4 s", 600.0: "10 min", 9000.0: "2.5 h",
    }  # fmt: skip
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    told = {f"time/made{n}_s": value for n, value in enumerate(seconds)}
    told |= {"throughput/made_tokens_per_s": 3.18e-5, "episode/seconds_mean": 3.18e-5}
    lines = [line | told for line in lines]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        for name in ("time", "throughput", "episode"):
            page.locator("#metrics summary", has_text=LABELS[name]).click()

        def value(name: str) -> str:
            title = page.locator(f"figcaption:text-is('{name}')")
            return page.locator("#metrics .card", has=title).locator(".u-value").last.inner_text()

        shown = [value(f"time/made{n}_s") for n in range(len(seconds))]
        assert shown == [*seconds.values()]
        assert value("episode/seconds_mean") == "32 µs"
        assert value("throughput/made_tokens_per_s") == "3.18e−5"


def test_ten_thousand_trajectories_open(tmp_path: Path, opened: Open) -> None:
    root = tmp_path / "run"
    make_tokenizer(root / "model", [f" w{number}." for number in range(99)])
    drawn = [*many(10_000, tokens=8, words=99)]
    paths = make_run(root, drawn, lines=metrics(60))
    assert write_report(paths, paths.report, most=10_000)["shown"] == 10_000
    with opened(paths.report) as page:
        assert "10,000 trajectories" in page.inner_text("output")
        assert page.locator("#grid [data-row]").count() < 100
        page.locator("#grid").evaluate("e => { e.scrollTop = e.scrollHeight }")
        page.locator(".trajectory", has_text="g1249/7").click()
        page.wait_for_selector("#detail[data-row='9999']")
        page.fill("[name=words]", " w98.")
        page.wait_for_selector("output[data-busy=false]", state="attached")
        left = (page.inner_text("output")).split()[0]
        assert int(left.replace(",", "")) == sum(
            98 in np.frombuffer(segments[0].tokens, "<i4") for _, _, segments in drawn
        )


def test_very_long_untrained_trajectory(tmp_path: Path, opened: Open) -> None:
    one = segment([0] * 200_001, sampled=200_000, version=3)
    paths = make_run(tmp_path / "run", [(None, header("g0/0/agent", [one], reward=0.0), [one])])
    write_report(paths, paths.report, most=1)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").click()
        page.wait_for_selector("#detail h3")
        assert texts(page, "#legend .chip") == ["version 3: 200,000 tokens"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_narrow_window(paths: RunPaths, scheme: str, opened: Open) -> None:
    write_report(paths, paths.report, most=100)
    viewport = {"width": 400, "height": 800}
    with opened(paths.report, viewport=viewport, color_scheme=scheme) as page:
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 400
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")


def test_runs_without_a_ledger_or_a_model(paths: RunPaths, tmp_path: Path, opened: Open) -> None:
    bare = RunPaths(tmp_path / "bare")
    bare.root.mkdir()
    lines = [
        {"step": step, "time": 5.0 * step, "train/epoch": 1.0, "train/loss": 1.0 / (step + 1)}
        for step in range(3)
    ]
    bare.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_report(bare, bare.report, most=10)
    with opened(bare.report) as page:
        assert texts(page, "nav a") == ["Curves", "Every metric"]
        assert texts(page, "#curves figcaption") == ["Loss"]
    shutil.rmtree(paths.root / "model")
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").nth(2).click()
        page.wait_for_selector("#detail[data-row='2']")
        assert "10 11 12 13" in page.inner_text("#detail .block.policy")


def test_branches_and_origins_of_a_session_are_shown(tmp_path: Path, opened: Open) -> None:
    root, payload = tmp_path / "run", branched_session()
    make_tokenizer(root / "model", [f" w{number}." for number in range(9)])
    paths = make_run(root, [(0, branched_header(payload, 0), payload)])
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")
        assert texts(page, "#detail h4") == [
            "Segment 1 of 2: edited, leaves segment 2 after 2 tokens",
            "Segment 2 of 2",
        ]
        assert texts(page, "#detail .policy h5 small") == [
            "2 tokens; prompt tokens: 2 reused, 1 new",
            "2 tokens; prompt tokens: 0 reused, 2 new",
            "2 tokens; prompt tokens: 4 reused, 1 new",
            "2 tokens; prompt tokens: 7 reused, 1 new",
        ]
        assert "4 turns certified, 0 trajectories wrong: 8 sampled" in page.inner_text("#ledger")


def test_segments_of_equal_tokens_point_only_at_earlier_ones(tmp_path: Path, opened: Open) -> None:
    first, again = (
        Origin(reused=0, new=2, reason="first"),
        Origin(reused=2, new=0, reason="resampled"),
    )
    turns = [
        ([1, 2], first),
        ([1, 2], again),
        ([1, 2], again),
        ([1, 2, 7, 8, 3], Origin(reused=4, new=1)),
    ]
    root, payload = (
        tmp_path / "run",
        branched_session([*turns, ([1, 4], Origin(reused=1, new=1, reason="edited"))]),
    )
    make_tokenizer(root / "model", [f" w{number}." for number in range(9)])
    own = replace(branched_header(payload, 0), turns=5, trained_tokens=10)
    paths = make_run(root, [(0, own, payload)])
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        page.locator("#grid [data-row]").first.click()
        page.wait_for_selector("#detail[data-row='0']")
        assert texts(page, "#detail h4") == [
            "Segment 1 of 4",
            "Segment 2 of 4: resampled, repeats segment 1",
            "Segment 3 of 4: resampled, continues segment 1",
            "Segment 4 of 4: edited, leaves segment 1 after 1 token",
        ]


def test_page_cuts_chunks_as_the_table_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Open
) -> None:
    monkeypatch.setattr(report_rows, "CHUNK_TOKENS", 50)
    root = tmp_path / "run"
    make_tokenizer(root / "model", [f" w{number}." for number in range(70)])
    drawn = list(many(30, tokens=30, words=70))
    paths = make_run(root, drawn)
    write_report(paths, paths.report, most=100)
    text: Callable[[Any], str] = lambda segments: "".join(  # noqa: E731
        f" w{token}." for token in np.frombuffer(segments[0].tokens, "<i4")
    )
    with opened(paths.report) as page:
        for row in (0, 7, 29):
            page.locator("#grid").evaluate(f"e => {{ e.scrollTop = {28 * row} }}")
            page.locator(f"#grid [data-row='{row}']").click()
            page.wait_for_selector(f"#detail[data-row='{row}']")
            words = page.locator("#detail .words")
            assert "".join(words.evaluate_all("all => all.map(e => e.textContent)")) == text(
                drawn[row][2]
            )
            tokens = drawn[row][1].trained_tokens
            coloured = page.locator("#detail .sampled").evaluate_all(
                "all => all.filter(e => e.style.backgroundColor).length"
            )
            assert coloured == tokens


def test_step_without_a_metric_is_a_gap_in_its_curve(tmp_path: Path, opened: Open) -> None:
    lines = metrics(5)
    del lines[3]["reward/mean"]  # step 3; the first line is an evaluation
    paths = make_run(tmp_path / "run", [], lines=lines)
    write_report(paths, paths.report, most=100)
    with opened(paths.report) as page:
        box = page.locator("#curves .u-over").first.bounding_box()
        value = page.locator("#curves .u-legend").first.locator(".u-value").nth(1)
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 3 / 5, middle)
        value.get_by_text("–", exact=True).wait_for()
        page.mouse.move(box["x"] + box["width"] * 4 / 5, middle)
        value.get_by_text(re.compile(r"^\d")).wait_for()
