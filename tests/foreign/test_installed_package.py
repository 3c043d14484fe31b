"""A package of somebody else, installed with pip, trains with its own parts.

Overrides name the parts; no option imports the package, and neither does this test.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Finished
from tests.foreign.conftest import Place

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

PACKAGE = Path(__file__).with_name("package")
PUBLIC = (
    "arealite.api.",
    "arealite.base.errors",
    "arealite.base.entries",
    "arealite.system.data.templates",
)
STEPS = 2
EPISODES = 8 * STEPS
PARTS = (
    "trainer.ppo.collector.agent.type=apple_picker",
    "trainer.ppo.collector.agent.apple_picker.question=(how)",
    "trainer.ppo.collector.env.type=apple_orchard",
    "trainer.ppo.collector.env.apple_orchard.trees=2",
    "trainer.ppo.collector.env.apple_orchard.reward.type=apple_ripeness",
    "trainer.ppo.loss.objective=apple_objective",
    "trainer.ppo.loss.apple_objective.strength=0.5",
    "trainer.ppo.advantage.type=apple_rank",
    "launcher.server_args=[llm_server.type=apple_server]",
)


@pytest.fixture(scope="module")
def place(folder: Path) -> Place:
    """Install the package from a copy of its source."""
    source = shutil.copytree(PACKAGE, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    target = folder / "site"
    done = subprocess.run(
        [*pip, *offline, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)
    environment = {
        "PYTHONPATH": str(target),
        "ORCHARD_TRACE": str(folder / "trace.txt"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return Place(folder, [sys.executable, "-m", "arealite"], environment)


@pytest.fixture(scope="module")
def trained(place: Place) -> Finished:
    done = place.train(*PARTS, f"trainer.ppo.total_steps={STEPS}")
    assert done.code == 0, done.shown + done.logs()
    return done


@pytest.fixture(scope="module")
def traced(place: Place, trained: Finished) -> dict[str, list[str]]:
    """Return the lines of each part."""
    lines: dict[str, list[str]] = defaultdict(list)
    for line in (place.folder / "trace.txt").read_text().splitlines():
        part, _, values = line.partition(" ")
        lines[part].append(values)
    return lines


def test_package_imports_only_public_modules():
    imported = set[str]()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported.update(name.name for name in node.names)
    of_arealite = {module for module in imported if module.partition(".")[0] == "arealite"}
    assert {module for module in of_arealite if not module.startswith(PUBLIC)} == {"arealite"}


def test_run_trains_every_step(trained: Finished) -> None:
    lines = [line for line in trained.metrics() if "reward/mean" in line]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        assert line["reward/parts/ripe"] == pytest.approx(line["reward/mean"])
        assert line["update/grad_norm"] > 0


def test_agent_environment_and_reward_play_every_episode(traced: dict[str, list[str]]) -> None:
    prompts = {"train tree 0", "train tree 1"}
    assert {*traced["env"]} == prompts and len(traced["env"]) >= EPISODES
    assert {*traced["agent"]} == {f"{prompt}(how)" for prompt in prompts}, "with its own option"
    assert {*traced["reward"]} == {"a"} and len(traced["reward"]) >= EPISODES


def test_objective_trains_every_step(traced: dict[str, list[str]]) -> None:
    assert {*traced["objective"]} == {"0.5"} and len(traced["objective"]) >= STEPS


def test_advantage_sees_the_groups_with_unequal_rewards(traced: dict[str, list[str]]) -> None:
    """Groups of equal rewards have the advantage 0, so the number of calls is not fixed."""
    assert {*traced["advantage"]} == {"4"}


def test_server_and_hook_run_once(traced: dict[str, list[str]]) -> None:
    assert traced["server"] == ["begin", "end"]
    assert traced["hook"] == ["t 0"]


def test_command_is_listed_and_called(place: Place) -> None:
    commands = " ".join(place.call("--help").stdout.split())
    assert "harvest of the installed package orchard" in commands
    done = place.call("harvest", "12")
    assert (done.returncode, done.stdout) == (0, "12 apples\n")
    refused = place.call("harvest")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: arealite harvest needs the number of apples\n",
    )


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("trainer.ppo.loss.objective=apple_objectve", "Did you mean 'apple_objective'?"),
        ("trainer.ppo.collector.env.apple_orchard.tres=1", "apple_orchard.trees'?"),
    ],
)
def test_mistake_in_a_part_of_the_package_is_one_line(option: str, says: str, place: Place) -> None:
    done = place.call("check", *place.run_options(*PARTS, option))
    shown = done.stdout + done.stderr
    assert done.returncode == 2 and says in shown and "Traceback" not in shown, shown
