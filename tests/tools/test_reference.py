"""Generated pages are up to date; links in README and docs have targets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

import arealite
from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config_tree
from arealite.cli.main import COMMANDS
from arealite.ext.view.metric_names import catalogue
from tests.ext.web.browser.sites import needs_chromium
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "examples/README.md",
    *DOCS.rglob("*.md"),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return reference.pages()


@pytest.mark.parametrize("name", ["config.md", "commands.md", "metrics.md", "python.md"])
def test_generated_page_is_up_to_date(made: dict[str, str], name: str) -> None:
    assert (reference.FOLDER / name).read_text("utf-8") == made[name], "run `make reference`"


def test_reference_has_every_key_command_and_metric(made: dict[str, str]) -> None:
    config = made["config.md"]
    for key, _, _ in config_tree.keys(ExperimentConfig):
        names = key.split(".")
        sections = [".".join(names[:n]) for n in range(1, len(names))]
        is_elsewhere = any(f"### {section}\n\nThe keys of `" in config for section in sections)
        assert f"\n| `{key}` | " in config or is_elsewhere, key
    assert all(f"\n## {name}\n" in made["commands.md"] for name in COMMANDS)
    assert "Traceback" not in made["commands.md"]
    assert all(f"\n| `{name}` | " in made["metrics.md"] for name in catalogue())


def test_reference_has_every_public_name_of_python(made: dict[str, str]) -> None:
    headings = re.findall(r"(?m)^### (\w+)$", made["python.md"])
    assert {*arealite.__all__} <= {*headings}
    assert "#### Run.trajectories\n" in made["python.md"]
    assert "    reward: Any = None,\n" in made["python.md"], "one parameter a line"
    assert "* `overrides`: Other options" in made["python.md"]
    assert "abstract async run(task: Task, **agents: Agent) -> None" in made["python.md"]


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (int, "int"),
        (str | None, "str or null"),
        (list[str], "list of str"),
        (dict[str, float], "map of float"),
        (dict[str, Any], "map of anything"),
    ],
)
def test_types_are_shown_in_yaml_terms(held: Any, told: str) -> None:
    assert reference.type_name(held) == told


def test_check_names_the_outdated_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path / "reference")
    monkeypatch.setattr(reference, "pages", lambda: {"config.md": "new"})
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1
    assert "docs/reference/config.md: stale" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0
    assert (tmp_path / "reference/config.md").read_text() == "new"
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0


# ---------------------------------------------------------------- links and the site


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_existing_targets(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(file), f"{link}: no such heading in {file.name}"


def test_site_navigation_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = sorted(entries(nav))
    there = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
    assert listed == sorted([*there, "examples/index.md"])


@pytest.mark.processes
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: the extra docs")
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """A warning is an error (strict mode)."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site/index.html").read_text("utf-8")
    assert 'href="examples/index.html"' in home
    example = (tmp_path / "site/examples/quickstart.html").read_text("utf-8")
    assert "OPTIONS = [" in example
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)', page.read_text()
        )
        assert loaded == [], "it works without a network"
    assert 'src="../search.js"' in (tmp_path / "site/examples/quickstart.html").read_text()
    index = (tmp_path / "site/search/search_index.js").read_text("utf-8")
    docs = json.loads(index.removeprefix("window.searchIndex = ").rstrip(";\n"))["docs"]
    assert "examples/quickstart.html" in {each["location"] for each in docs}


@pytest.mark.processes
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: the extra docs")
@needs_chromium
def test_site_search_works_without_a_web_server(tmp_path: Path) -> None:
    """The site is opened from the file system, without a network."""
    from playwright.sync_api import expect, sync_playwright

    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium-headless-shell"))
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((tmp_path / "site/tutorials/index.html").as_uri())
        page.fill("[role=search] input", "max_staleness")
        page.keyboard.press("Enter")
        results = page.locator("#mkdocs-search-results")
        section = results.locator("a[href$='reference/config.html#trainerppo']")
        expect(section).to_have_text("trainer.ppo")  # the section that lists the key
        for query, shown in {
            "nosuchwordatall": "No results found",
            "~^ +:": "Type a word",
            "nosuchfield:publisher~^": "publisher",  # special characters are plain text
        }.items():
            page.fill("#mkdocs-search-query", query)
            expect(results).to_contain_text(shown)
        page.click("#mkdocs-search-results a >> nth=0")
        page.wait_for_url(re.compile(r"/site/(?!search)[\w/]+\.html"))
        browser.close()
    assert wrong == []


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?m)^(?: {4}|\t).*$", "", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def entries(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [entry for part in parts for entry in entries(part)]
