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
from arealite.base.files import read_toml
from arealite.ext.web import webarena_checks as checks
from arealite.ext.web.browser.chromium import Browser
from arealite.ext.web.browser.page_episode import play

if TYPE_CHECKING:
    from arealite.ext.web.browser.page import Page

logger = log.get(__name__)

SITES = ("shopping", "shopping_admin", "reddit", "gitlab", "wikipedia", "map", "homepage")
PLACEHOLDER = re.compile(r"__([A-Z]+(?:_[A-Z]+)*)__")
JUDGE: str = read_toml(__file__, "webarena.toml")["judge"]


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
            raise UserError(
                "webarena.sites={}: there are no sites. "
                "Set their addresses there, or in the variables WA_SHOPPING, WA_REDDIT, …"
            )
        self.browser = Browser(self.config.browser, [*sites.values()])
        self.cleanup.push_async_callback(self.browser.close)
        await self.browser.setup()

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the playable tasks of the file without end, shuffled again each time."""
        tasks = load_tasks(config)
        rng = random.Random(f"{split}-{seed}")
        if config.held_out:
            tasks = tasks_of_split(tasks, split, config.held_out)
        if not tasks:
            raise UserError(
                f"webarena.tasks={config.tasks} has no tasks for the split {split}. "
                f"Add tasks, or change webarena.held_out={config.held_out}."
            )
        while True:
            rng.shuffle(tasks)
            for task in tasks:
                data_source = "+".join(task["sites"])
                yield {
                    "prompt": task["intent"],
                    "extra_info": {"task": task, "data_source": data_source},
                }

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one task, then run its checks.

        Raises:
            EpisodeError: The page or the browser failed, or the task's checks are not implemented.
        """
        definition = task.extra_info.get("task")
        agent = agents["agent"]
        if not isinstance(definition, dict):
            raise EpisodeError(f"{task.task_id} has no WebArena task in extra_info.task")
        unsupported_checks = checks.unsupported(definition)
        if unsupported_checks:
            raise checks.UnsupportedCheck(f"{task.task_id}: {unsupported_checks}")
        storage_state: Any = definition.get("storage_state") or {}
        async with self.browser.page(storage_state=storage_state) as page:
            start_url, *other_urls = str(definition["start_url"]).split(" |AND| ")
            await page.open(start_url)
            page.notes += [f"Another page of this task: {url}" for url in other_urls]
            answer, _ = await play(
                page,
                agent,
                goal=definition["intent"],
                max_steps=self.config.max_steps,
                look=page.look,
            )
            judge = partial(self._judge, definition, agents.get("judge"))
            passed = await self._check(page, definition["eval"], answer or "", judge)
        score = float(passed)
        agent.reward(score, success=score, stopped=float(answer is not None))

    async def _check(
        self,
        page: "Page",
        rules: Any,
        answer: str,
        judge: checks.Judge,
    ) -> bool:
        """Return whether an episode passes all checks in `rules`, the `eval` of the task."""
        kinds = rules["eval_types"]
        references: dict[str, Any] = {}
        if "string_match" in kinds:
            references = rules["reference_answers"]
        if not await checks.string_match(answer, references, judge):
            return False
        if "url_match" in kinds:
            reference_url = rules["reference_url"]
            if not checks.url_match(page.tab.url, reference_url):
                return False
        if "program_html" in kinds:
            for target in rules["program_html"]:
                content = await find(page, target)
                if not checks.content_match(content, target["required_contents"]):
                    return False
        return True

    async def _judge(
        self,
        definition: Any,
        judge: Agent | None,
        right: str,
        answer: str,
    ) -> bool:
        """Return whether an answer means the same as the right one, or has its words (no judge)."""
        if judge is None:
            return checks.words(right) == checks.words(answer)
        if right == "N/A":
            note = definition["eval"].get("string_note") or ""
            right = f"It cannot be done. {note}"
        question = JUDGE.format(
            question=definition["intent"],
            right=right,
            given=answer,
        )
        action = await judge.act(question)
        verdict = checks.words(action.text)
        return "yes" in verdict and "no" not in verdict


async def find(page: "Page", target: dict[str, Any]) -> str:
    """Return the text that a target of `program_html` locates; "" if the page has none."""
    if target["url"] != "last":
        await page.open(target["url"])
    locator = target["locator"].strip()
    if not locator:
        return str(await page.evaluate("() => document.documentElement.outerHTML"))
    preparation = "; ".join(target.get("prep_actions", []))
    prepare = f"try {{ {preparation} }} catch {{}}"
    locate = f"try {{ return {locator} }} catch {{ return '' }}"
    located = await page.evaluate(f"() => {{ {prepare} {locate} }}")
    return str(located or "")


def addresses(config: dict[str, str]) -> dict[str, str]:
    """Return the sites' URLs by name, from the config or else from WA_<NAME>."""
    from_environment = {name: os.environ.get(f"WA_{name.upper()}", "") for name in SITES}
    sites = from_environment | config
    return {name: url.rstrip("/") for name, url in sites.items() if url}


def tasks_of_split(
    tasks: list[dict[str, Any]],
    split: str,
    held_out: int,
) -> list[dict[str, Any]]:
    """Return the tasks of a split: every `held_out`-th task is left out of the split train."""
    is_train = split == "train"
    selected: list[dict[str, Any]] = []
    for number, task in enumerate(tasks, start=1):
        is_held_out = number % held_out == 0
        if is_held_out != is_train:
            selected.append(task)
    return selected


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
    playable: list[dict[str, Any]] = []
    try:
        for task in json.loads(path.read_text(encoding="utf-8")):
            obstacle = obstacle_of(task, sites)
            if obstacle:
                left_out[obstacle] += 1
            else:
                playable.append(with_addresses(task, sites))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"webarena.tasks={path}: the file must hold a JSON list of tasks "
            f"({type(error).__name__}: {error})."
        ) from error
    if left_out:
        logger.warning(
            "tasks left out",
            missing_sites_or_checks=dict(left_out),
            kept=len(playable),
        )
    if not playable:
        raise UserError(
            f"webarena.tasks={path}: no task can be played. "
            f"Set webarena.sites, or WA_…, for: {', '.join(left_out)}"
        )
    check_cookie_files(path, playable)
    return playable


def obstacle_of(task: dict[str, Any], sites: dict[str, str]) -> str:
    """Return the reason for which a task cannot be played, "" if it can.

    The reason is "func:" for an unsupported check, or the names of the missing sites.
    """
    placeholders = set(PLACEHOLDER.findall(json.dumps(task)))
    if checks.unsupported(task):
        return "func:"
    return ", ".join(sorted(name for name in placeholders if name.lower() not in sites))


def with_addresses(task: dict[str, Any], sites: dict[str, str]) -> dict[str, Any]:
    """Return a task with the sites' addresses in place of the placeholders."""
    task_json = json.dumps(task)
    for name, url in sites.items():
        url_in_json = json.dumps(url)[1:-1]
        task_json = task_json.replace(f"__{name.upper()}__", url_in_json)
    return json.loads(task_json)


def check_cookie_files(path: Path, tasks: list[dict[str, Any]]) -> None:
    """Check that the tasks' files with cookies exist.

    Raises:
        UserError: A file does not exist.
    """
    files = {task.get("storage_state") or "" for task in tasks}
    missing_files = [file for file in files if file and not Path(file).is_file()]
    if missing_files:
        raise UserError(
            f"webarena.tasks={path}: "
            f"{min(missing_files)}, the storage_state of a task, does not exist. "
            "Save the cookies there with WebArena's login script."
        )
