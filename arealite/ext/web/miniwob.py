"""MiniWoB++'s tasks: small web pages with a goal and a score.

The pages are those of the package `miniwob`. The reward is the raw one of the page, without its
decay over time. Source of the protocol: https://miniwob.farama.org.
"""

import importlib.util
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement
from arealite.base.registry import unknown
from arealite.ext.web.browser.chromium import Browser
from arealite.ext.web.browser.page_episode import play
from arealite.ext.web.config import BrowserEnvConfig

if TYPE_CHECKING:
    from arealite.ext.web.browser.page import Page, View

UNLISTED = {
    "button-delay",
    "chase-circle",
    "flight.Alaska-auto-medium",
    "hover-shape",
    "moving-items",
    "simon-says",
}
"""Pages that are not among the 128 tasks, most of them because they need timing. `browser.tasks`
may name them."""
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
"""Elements of a page that are not part of the task."""
LEFT = -1.0
"""Reward of an agent that leaves the task's page. The score of the new page does not count."""


class BrowserEnv(Env):
    """Lets an agent act on one page. The reward is -1 to 1; 0 if the task is not finished."""

    async def setup(self) -> None:
        """Start the file server of the pages and the browser."""
        self.address = await self.cleanup.enter_async_context(serve_folder(html_folder()))
        self.browser = Browser(self.config.browser, [self.address])
        self.cleanup.push_async_callback(self.browser.close)
        await self.browser.setup()

    @classmethod
    def rows(cls, config: BrowserEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield all tasks in random order, again and again; each split has other seeds."""
        names = task_names(config.tasks)
        rng = random.Random(f"{split}-{seed}")
        while True:
            rng.shuffle(names)
            for name in names:
                extra_info = {
                    "task": name,
                    "seed": rng.randrange(2**31),
                    "data_source": name,
                }
                yield {"prompt": name, "extra_info": extra_info}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one task. A row without a seed has the seed 0.

        Raises:
            EpisodeError: The task is unknown, or the page or the browser failed.
        """
        agent = agents["agent"]
        name = str(task.extra_info.get("task", task.prompt))
        seed = int(task.extra_info.get("seed", 0))
        async with self.browser.page() as page:
            goal = await self._begin(page, name, seed)
            _, view = await play(
                page,
                agent,
                goal=goal,
                max_steps=self.config.max_steps,
                look=partial(page.look, SKIPPED, WATCHED),
                is_over=is_over,
                shows_address=False,
            )
        state = TaskState.of(view)
        score = float(state.raw_reward or 0.0) if state.is_task_page else LEFT
        agent.reward(score, success=float(score > 0))

    async def _begin(self, page: "Page", name: str, seed: int) -> str:
        if name not in page_names():
            raise EpisodeError(unknown("task", name, sorted(page_names())))
        await page.open(f"{self.address}/{page_path(name)}")
        goal = await page.evaluate(BEGIN, seed)
        if isinstance(goal, dict):
            return goal["utterance"]
        return str(goal)


class TaskState(NamedTuple):
    """The variables in WATCHED of a page."""

    is_task_page: Any = None
    """None: the agent has left the task's page."""
    is_done: Any = None
    raw_reward: Any = None

    @classmethod
    def of(cls, view: "View") -> "TaskState":
        """Return the state of a view."""
        if not view.state:
            return cls()
        is_task_page, is_done, raw_reward = view.state
        return cls(is_task_page, is_done, raw_reward)


def is_over(view: "View") -> bool:
    """Return whether the task is finished or the agent has left its page."""
    state = TaskState.of(view)
    return not state.is_task_page or bool(state.is_done)


@asynccontextmanager
async def serve_folder(root: Path) -> AsyncGenerator[str]:
    """Answer GET requests with the files below `root` on loopback until the body exits.

    With file:// an agent could read this machine's files. Intercepting requests in the browser
    would make each load about three times as slow.

    Yields:
        The address, as `http://127.0.0.1:port`.
    """
    app = web.Application()
    app.router.add_static("/", root)
    app.on_response_prepare.append(_add_headers)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Let the browser keep files, and read texts as UTF-8."""
    response.headers["Cache-Control"] = "max-age=86400"
    if response.content_type.startswith("text/"):
        response.charset = "utf-8"


def html_folder() -> Path:
    """Return the folder of MiniWoB++'s pages, without importing the package.

    Raises:
        UserError: The package is not installed.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"No module named 'miniwob'. Install it: pip install {extra_requirement('browser')}."
        )
    package = Path(spec.submodule_search_locations[0])
    return package / "html"


def page_names() -> set[str]:
    """Return the names of all pages of the package."""
    root = html_folder()
    pages = {file.stem for file in root.glob("miniwob/*.html")}
    for file in root.glob("flight/*/wrapper.html"):
        pages.add(f"flight.{file.parent.name}")
    return pages


def page_path(name: str) -> str:
    """Return the path of a task's page in the folder."""
    kind, _, flight = name.partition(".")
    if flight:
        return f"flight/{flight}/wrapper.html"
    return f"miniwob/{kind}.html"


def task_names(configured: list[str]) -> list[str]:
    """Return the names of the configured tasks, sorted; "all" stands for the 128 tasks.

    Raises:
        UserError: A task is unknown.
    """
    pages = page_names()
    for name in configured:
        if name not in pages and name != "all":
            choices = ["all", *sorted(pages)]
            raise UserError(f"browser.tasks: {unknown('task', name, choices)}")
    if "all" in configured:
        return sorted(pages - UNLISTED)
    return sorted(set(configured))
