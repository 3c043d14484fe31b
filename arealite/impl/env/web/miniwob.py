"""MiniWoB++'s tasks: small web pages with a goal, which score what is done to them.

The pages are the package's own; the reward is the page's raw one, without its decay over time.
Source of the protocol: https://miniwob.farama.org.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement
from arealite.base.registry import unknown
from arealite.impl.browser.files import FileServer
from arealite.impl.browser.play import play
from arealite.impl.browser.process import Browser

if TYPE_CHECKING:
    from arealite.impl.browser.page import Page, View

UNLISTED = {"button-delay", "chase-circle", "hover-shape", "moving-items", "simon-says"}
UNLISTED.add("flight.Alaska-auto-medium")
"""Pages that are none of the 128 tasks: most are about timing. They can be asked for by name."""
BEGIN = """async seed => {
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = 3.6e6;
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise(resolve => setTimeout(resolve, 5));
  window.__task = true;
  return core.getUtterance();
}"""
WATCHED = ("__task", "WOB_DONE_GLOBAL", "WOB_RAW_REWARD_GLOBAL")
SKIPPED = "#query, #query-wrap, #reward-display, #sync-task-cover, #click-canvas"
"""What a page shows beside the task itself."""
LEFT = -1.0
"""The reward of leaving the task's page, as of any other failure: another task's page, or the
same anew, would score something else."""


class BrowserEnv(Env):
    """Lets agents act on one page until it is done; -1 to 1, and 0 where it is left undone."""

    async def setup(self) -> None:
        """Start the server of the pages and the browser."""
        self.files = FileServer(html_folder())
        await self.files.setup()
        self.browser = Browser(self.config.browser, [self.files.address])
        await self.browser.setup()

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield every task in turn, with seeds of its own for each split."""
        names, rng = task_names(config.tasks), random.Random(f"{split}-{seed}")
        while True:
            rng.shuffle(names)
            for name in names:
                about = {"task": name, "seed": rng.randrange(2**31), "data_source": name}
                yield {"prompt": name, "extra_info": about}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one page; the seed of a row without one is 0.

        Raises:
            EpisodeError: the page or the browser failed.
        """
        name = str(task.extra_info.get("task", task.prompt))
        async with self.browser.page() as page:
            goal = await self._begin(page, name, int(task.extra_info.get("seed", 0)))
            look = partial(page.look, SKIPPED, WATCHED)
            about = {"goal": goal, "max_steps": self.config.max_steps, "tells_where": False}
            _, view = await play(page, agents["agent"], look=look, is_over=is_over, **about)
        score = float(view.state[2] or 0.0) if view.state and view.state[0] else LEFT
        agents["agent"].reward(score, success=float(score > 0))

    async def _begin(self, page: Page, name: str, seed: int) -> str:
        if name not in page_names():
            raise EpisodeError(unknown("task", name, sorted(page_names())))
        await page.open(f"{self.files.address}/{page_path(name)}")
        said = await page.evaluate(BEGIN, seed)
        return said["utterance"] if isinstance(said, dict) else str(said)

    async def close(self) -> None:
        """Stop both."""
        await self.browser.close()
        await self.files.close()


def is_over(view: View) -> bool:
    """Say whether the page is done, or is another page now."""
    return not view.state or not view.state[0] or bool(view.state[1])


def html_folder() -> Path:
    """Return the folder of MiniWoB++'s pages; the package itself is not imported.

    Raises:
        UserError: it is not installed.
    """
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"No module named 'miniwob'. Install it: pip install {extra_requirement('browser')}."
        )
    return Path(found.submodule_search_locations[0]) / "html"


def page_names() -> set[str]:
    """Return the names of all pages there are."""
    root = html_folder()
    flights = {f"flight.{file.parent.name}" for file in root.glob("flight/*/wrapper.html")}
    return {file.stem for file in root.glob("miniwob/*.html")} | flights


def page_path(name: str) -> str:
    """Return where a task's page is in the folder."""
    kind, _, which = name.partition(".")
    return f"flight/{which}/wrapper.html" if which else f"miniwob/{kind}.html"


def task_names(asked: list[str]) -> list[str]:
    """Return the names of the tasks asked for, sorted.

    Raises:
        UserError: there is none of a name.
    """
    known = page_names()
    for name in set(asked) - known - {"all"}:
        raise UserError("browser.tasks: " + unknown("task", name, ["all", *sorted(known)]))
    return sorted(known - UNLISTED) if "all" in asked else sorted(set(asked))
