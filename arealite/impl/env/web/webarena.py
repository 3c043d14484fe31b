"""WebArena's tasks on real web applications that the user serves.

Tasks have the form that WebArena publishes (config/test.raw.json of its repository). Placeholders
as __SHOPPING__ are replaced by the addresses in the config or in the variable WA_SHOPPING.
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base import log
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.browser.play import play
from arealite.impl.browser.process import Browser
from arealite.impl.env.prompts import PROMPTS
from arealite.impl.env.web import webarena_checks as checks

if TYPE_CHECKING:
    from arealite.impl.browser.page import Page

logger = log.get(__name__)

SITES = ("shopping", "shopping_admin", "reddit", "gitlab", "wikipedia", "map", "homepage")
PLACEHOLDER = re.compile(r"__([A-Z]+(?:_[A-Z]+)*)__")
JUDGE = PROMPTS["webarena"]["judge"]


class WebArenaEnv(Env):
    """Lets an agent act on a task's sites until it stops. The reward is 1 if all checks pass."""

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        if config.judge:
            self.seats = ("agent", "judge")

    async def setup(self) -> None:
        """Start the browser, which can reach only the configured sites.

        Raises:
            UserError: No site is configured, or the browser does not start.
        """
        sites = addresses(self.config.sites)
        if not sites:
            fix = "Set their addresses there, or in the variables WA_SHOPPING, WA_REDDIT, …"
            raise UserError(f"webarena.sites={{}}: there are no sites. {fix}")
        self.browser = Browser(self.config.browser, [*sites.values()])
        self.cleanup.push_async_callback(self.browser.close)
        await self.browser.setup()

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the playable tasks of the file without end, shuffled again each time."""
        tasks = load_tasks(config)
        rng = random.Random(f"{split}-{seed}")
        if config.held_out:
            is_train = split == "train"
            every = config.held_out
            tasks = [task for n, task in enumerate(tasks) if bool((n + 1) % every) == is_train]
        if not tasks:
            what = f"webarena.tasks={config.tasks} has no tasks for the split {split}"
            raise UserError(f"{what}. Add tasks, or change webarena.held_out={config.held_out}.")
        while True:
            rng.shuffle(tasks)
            for task in tasks:
                extra_info = {"task": task, "data_source": "+".join(task["sites"])}
                yield {"prompt": task["intent"], "extra_info": extra_info}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one task, then run its checks.

        Raises:
            EpisodeError: The page or the browser failed, or the task's checks are not implemented.
        """
        definition = task.extra_info.get("task")
        agent = agents["agent"]
        if not isinstance(definition, dict):
            raise EpisodeError(f"{task.task_id} has no WebArena task in extra_info.task")
        if missing := checks.unsupported(definition):
            raise checks.UnsupportedCheck(f"{task.task_id}: {missing}")
        async with self.browser.page(storage_state=definition.get("storage_state") or {}) as page:
            start, *others = str(definition["start_url"]).split(" |AND| ")
            await page.open(start)
            page.notes += [f"Another page of this task: {other}" for other in others]
            steps = self.config.max_steps
            goal = definition["intent"]
            answer, _ = await play(page, agent, goal=goal, max_steps=steps, look=page.look)
            judge = partial(self._judge, definition, agents.get("judge"))
            score = float(await self._check(page, definition["eval"], answer or "", judge))
        agent.reward(score, success=score, stopped=float(answer is not None))

    async def _check(self, page: "Page", rules: Any, answer: str, judge: checks.Judge) -> bool:
        kinds = rules["eval_types"]
        references = rules["reference_answers"] if "string_match" in kinds else {}
        if not await checks.string_match(answer, references, judge):
            return False
        if "url_match" in kinds and not checks.url_match(page.tab.url, rules["reference_url"]):
            return False
        for target in rules["program_html"] if "program_html" in kinds else []:
            if not checks.content_match(await find(page, target), target["required_contents"]):
                return False
        return True

    async def _judge(self, definition: Any, judge: Agent | None, right: str, given: str) -> bool:
        if judge is None:
            return checks.words(right) == checks.words(given)
        if right == "N/A":
            right = "It cannot be done. " + (definition["eval"].get("string_note") or "")
        question = JUDGE.format(question=definition["intent"], right=right, given=given)
        verdict = checks.words((await judge.act(question)).text)
        return "yes" in verdict and "no" not in verdict


async def find(page: "Page", target: dict[str, Any]) -> str:
    """Return the text that a target of `program_html` locates; "" if the page has none."""
    if target["url"] != "last":
        await page.open(target["url"])
    locator = target["locator"].strip()
    if not locator:
        return str(await page.evaluate("() => document.documentElement.outerHTML"))
    first = "; ".join(target.get("prep_actions", []))
    script = f"try {{ {first} }} catch {{}} try {{ return {locator} }} catch {{ return '' }}"
    return str(await page.evaluate(f"() => {{ {script} }}") or "")


def addresses(config: dict[str, str]) -> dict[str, str]:
    """Return the sites' URLs by name, from the config or else from WA_<NAME>."""
    own = {name: os.environ.get(f"WA_{name.upper()}", "") for name in SITES}
    return {name: url.rstrip("/") for name, url in {**own, **config}.items() if url}


def load_tasks(config: Any) -> list[dict[str, Any]]:
    """Read the tasks that can be played and checked; replace placeholders by the sites' addresses.

    Raises:
        UserError: The file does not exist or has no playable task, or a cookie file is missing.
    """
    if not config.tasks:
        raise UserError("webarena.tasks is not set. Set a file of tasks in WebArena's JSON.")
    path = Path(config.tasks)
    sites = addresses(config.sites)
    left_out: Counter[str] = Counter()
    made: list[dict[str, Any]] = []
    try:
        for task in json.loads(path.read_text(encoding="utf-8")):
            text = json.dumps(task)
            missing = {name for name in PLACEHOLDER.findall(text) if name.lower() not in sites}
            if why := (checks.unsupported(task) and "func:") or ", ".join(sorted(missing)):
                left_out[why] += 1
                continue
            for name, url in sites.items():
                text = text.replace(f"__{name.upper()}__", json.dumps(url)[1:-1])
            made.append(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"webarena.tasks={path}: the file must hold a JSON list of tasks"
        raise UserError(f"{what} ({type(error).__name__}: {error}).") from error
    if left_out:
        logger.warning("tasks left out", missing_sites_or_checks=dict(left_out), kept=len(made))
    if not made:
        what = f"webarena.tasks={path}: no task can be played"
        raise UserError(f"{what}. Set webarena.sites, or WA_…, for: {', '.join(left_out)}")
    cookies = [task.get("storage_state") or "" for task in made]
    if files := {file for file in cookies if file and not Path(file).is_file()}:
        what = f"webarena.tasks={path}: {min(files)}, the storage_state of a task, does not exist"
        raise UserError(f"{what}. Save the cookies there with WebArena's login script.")
    return made
