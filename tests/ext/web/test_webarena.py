"""WebArena's tasks on two small sites: a shop with a cart and a login, and a forum."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from arealite.api.episode import Action
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.web.config import BrowserConfig, WebArenaConfig
from arealite.ext.web.webarena import WebArenaEnv, load_tasks
from arealite.ext.web.webarena_checks import UnsupportedCheck
from tests.ext.web.browser.sites import needs_chromium, serving


def task(number: int, intent: str, start: str = "__SHOPPING__", **checks: Any) -> dict[str, Any]:
    """Return a task as WebArena publishes them."""
    kinds = {"reference_answers": "string_match", "reference_url": "url_match"}
    kinds["program_html"] = "program_html"
    return {
        "sites": ["shopping"],
        "task_id": number,
        "require_login": False,
        "storage_state": None,
        "start_url": start,
        "geolocation": None,
        "intent": intent,
        "eval": {"eval_types": [kinds[name] for name in checks], **checks},
    }


LAST = {"url": "last", "locator": "document.querySelector('h1').outerText"}
TASKS = [
    task(0, "What does the watch cost?", reference_answers={"must_include": ["12 EUR"]}),
    task(1, "Show me the watch.", reference_url="__SHOPPING__/watch"),
    task(
        2,
        "Buy the watch.",
        program_html=[
            {
                "url": "__SHOPPING__/cart",
                "locator": "",
                "required_contents": {"must_include": ["Watch", "1 piece |OR| one piece"]},
            },
            {
                "url": "last",
                "locator": "[...document.querySelectorAll('li')].map(e => e.outerText).join(' ')",
                "prep_actions": ["document.nothing.at.all()"],
                "required_contents": {"exact_match": "Watch, 1 piece"},
            },
        ],
    ),
    task(
        3,
        "Compare with the forum.",
        "__SHOPPING__/watch |AND| __REDDIT__/f/watches",
        reference_answers={"fuzzy_match": ["it is good"]},
        reference_url="__REDDIT__/f/watches",
        program_html=[{**LAST, "required_contents": {"exact_match": "Watches"}}],
    ),
    task(4, "Whose account is it?", "__SHOPPING__/me", reference_answers={"exact_match": "Emma"}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """Yield an environment with two sites and a file of tasks."""
    folder: Path = tmp_path_factory.mktemp("webarena")
    cart: list[str] = []

    async def cart_page(request: web.Request) -> web.Response:
        if request.method == "POST":
            cart.append(str((await request.post())["item"]))
            raise web.HTTPFound("/cart")
        told = "".join(f"<li>{item}, 1 piece</li>" for item in cart)
        return web.Response(text=f"<h1>Cart</h1><ul>{told}</ul>", content_type="text/html")

    async def account(request: web.Request) -> web.Response:
        name = request.cookies.get("user", "nobody")
        return web.Response(text=f"<h1>Hello {name}</h1>", content_type="text/html")

    shop = {
        "/": "<title>Shop</title><h1>Shop</h1><a href=/watch>Watch</a>",
        "/watch": "<title>Watch</title><h1>Watch</h1><p>12 EUR</p>"
        "<form method=post action=/cart><input type=hidden name=item value=Watch>"
        "<button>Buy</button></form>",
        "/cart": cart_page,
        "/me": account,
    }
    forum = {"/f/watches": "<title>Forum</title><h1>Watches</h1><p>It is good."}
    async with serving(shop) as shopping, serving(forum) as reddit:
        cookie = {"name": "user", "value": "Emma", "domain": "127.0.0.1", "path": "/"}
        more = {"expires": -1, "httpOnly": False, "secure": False, "sameSite": "Lax"}
        state = folder / "emma.json"
        state.write_text(json.dumps({"cookies": [{**cookie, **more}], "origins": []}))
        tasks = [*TASKS[:4], {**TASKS[4], "storage_state": str(state)}]
        file = folder / "tasks.json"
        file.write_text(json.dumps(tasks))
        config = WebArenaConfig(
            tasks=str(file),
            sites={"shopping": shopping.address + "/", "reddit": reddit.address},
            held_out=0,
            browser=BrowserConfig(contexts=2, settle_ms=30, timeout_s=60.0),
        )
        env = WebArenaEnv(None, config)
        await env.setup()
        env.cart = cart  # type: ignore[attr-defined]
        yield env
        await env.close()


class Player:
    """An agent with scripted answers that records its observations and rewards."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.seen: list[str] = []
        self.got: list[tuple[float, dict[str, float]]] = []

    async def act(self, observation: Any) -> Action:
        self.seen.append(str(getattr(observation, "content", observation)))
        return Action(self.answers.pop(0))

    def reward(self, value: float, **parts: float) -> None:
        self.got.append((value, parts))


async def play(env: WebArenaEnv, number: int, *answers: str, **more: Any) -> Player:
    (about,) = [each for each in load_tasks(env.config) if each["task_id"] == number]
    player: Any = Player(*answers)
    await env.run(
        Task(task_id="t", prompt=about["intent"], ground_truth=None, extra_info={"task": about}),
        **{"agent": player, **more},
    )
    return player


@needs_chromium
@pytest.mark.processes
@pytest.mark.asyncio(loop_scope="module")
class TestInBrowser:
    """Tests that need a browser."""

    async def test_question_is_answered_and_scored(self, world) -> None:
        player = await play(world, 0, "click [2]", "stop [It is 12 EUR]")
        assert player.got[-1] == (1.0, {"success": 1.0, "stopped": 1.0})
        assert "Goal: What does the watch cost?\nPage: Shop (" in player.seen[0]
        assert '[2] p "12 EUR"' in player.seen[1]
        assert (await play(world, 0, "stop [13 EUR]")).got[-1][0] == 0.0

    async def test_page_is_found_and_scored(self, world) -> None:
        assert (await play(world, 1, "click [2]", "stop")).got[-1][0] == 1.0
        assert (await play(world, 1, "stop")).got[-1][0] == 0.0

    async def test_changes_on_the_site_are_checked(self, world) -> None:
        world.cart.clear()
        assert (await play(world, 2, "stop")).got[-1][0] == 0.0
        assert (await play(world, 2, "click [2]", "click [3]", "stop")).got[-1][0] == 1.0
        assert world.cart == ["Watch"]

    async def test_all_checks_must_pass_on_two_sites(self, world) -> None:
        forum = world.config.sites["reddit"] + "/f/watches"
        good = await play(world, 3, f"goto [{forum}]", "stop [It is good!]")
        assert good.got[-1][0] == 1.0
        assert f"Another page of this task: {forum}" in good.seen[0]
        assert (await play(world, 3, "stop [it is good]")).got[-1][0] == 0.0
        assert (await play(world, 3, f"goto [{forum}]", "stop [bad]")).got[-1][0] == 0.0

    async def test_each_task_has_its_own_login(self, world) -> None:
        player = await play(world, 4, "stop [Emma]")
        assert 'h1 "Hello Emma"' in player.seen[0]
        assert player.got[-1][0] == 1.0
        about = {**TASKS[4], "start_url": world.config.sites["shopping"] + "me"}
        stranger: Any = Player("stop")
        await world.run(
            Task(task_id="t", prompt="?", ground_truth=None, extra_info={"task": about}),
            agent=stranger,
        )
        assert 'h1 "Hello nobody"' in stranger.seen[0]

    async def test_judge_decides_if_configured(self, world) -> None:
        forum = world.config.sites["reddit"] + "/f/watches"
        for verdict, score in (("Yes.", 1.0), ("No, it says more.", 0.0), ("hm", 0.0)):
            judge = Player(verdict)
            answers = (f"goto [{forum}]", "stop [People like it]")
            assert (await play(world, 3, *answers, judge=judge)).got[-1][0] == score
            assert "Given answer: People like it" in judge.seen[0]

    async def test_agent_that_never_stops_is_scored(self, world) -> None:
        player = await play(world, 1, *["click [2]"] + ["nothing"] * 29)
        assert len(player.seen) == 30
        assert player.got[-1] == (1.0, {"success": 1.0, "stopped": 0.0})

    async def test_foreign_site_is_refused(self, world) -> None:
        player = await play(world, 1, "goto [http://elsewhere.test/]", "stop")
        assert "is not on a site of this task" in player.seen[1]

    async def test_task_with_unsupported_checks_fails_before_playing(self, world) -> None:
        call = {"url": "func:x()", "locator": "", "required_contents": {}}
        about = task(9, "?", program_html=[call])
        with pytest.raises(UnsupportedCheck, match="func:x"):
            await world.run(
                Task(task_id="t", prompt="?", ground_truth=None, extra_info={"task": about}),
                agent=Player(),
            )
        with pytest.raises(EpisodeError, match="no WebArena task"):
            await world.run(
                Task(task_id="t", prompt="?", ground_truth=None, extra_info={}), agent=Player()
            )


def config(tmp_path: Path, tasks: Any, **more: Any) -> WebArenaConfig:
    file = tmp_path / "tasks.json"
    file.write_text(tasks if isinstance(tasks, str) else json.dumps(tasks))
    return WebArenaConfig(tasks=str(file), **more)


def rows(config: WebArenaConfig, split: str, count: int = 10) -> list[dict[str, Any]]:
    return list(islice(WebArenaEnv.rows(config, split=split, seed=1), count))


def test_rows_hold_tasks_out_for_evaluation(tmp_path: Path) -> None:
    own = config(tmp_path, [task(n, f"do {n}") for n in range(10)], sites={"shopping": "http://a"})
    train = {row["prompt"] for row in rows(own, "train", 20)}
    held = {row["prompt"] for row in rows(own, "eval", 20)}
    assert held == {"do 4", "do 9"}
    assert train == {f"do {n}" for n in range(10)} - held
    assert rows(own, "train") == rows(own, "train")
    row = rows(own, "train")[0]
    assert row["extra_info"]["task"]["start_url"] == "http://a"
    assert row["extra_info"]["data_source"] == "shopping"


def test_sites_come_from_the_config_or_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WA_SHOPPING", "http://from-env:1/")
    own = config(tmp_path, [task(0, "do", "__SHOPPING__/x")])
    assert load_tasks(own)[0]["start_url"] == "http://from-env:1/x"
    own = config(tmp_path, [task(0, "do")], sites={"shopping": 'http://a/"b'})
    assert load_tasks(own)[0]["start_url"] == 'http://a/"b'


def test_unplayable_tasks_are_left_out(tmp_path: Path) -> None:
    call = {"url": "func:x()", "locator": "", "required_contents": {}}
    made = [task(0, "a"), task(1, "b", "__GITLAB__"), task(2, "c", program_html=[call])]
    own = config(tmp_path, made, sites={"shopping": "http://a"})
    assert [each["intent"] for each in load_tasks(own)] == ["a"]


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ("{", "must hold a JSON list of tasks"),
        ("[1]", "must hold a JSON list of tasks"),
        ('[{"intent": "x"}]', "must hold a JSON list of tasks"),
        ([task(0, "x", "__GITLAB__")], "GITLAB"),
        (
            [{**task(0, "x", "http://a"), "storage_state": "none.json"}],
            "none.json, the storage_state of a task, does not exist",
        ),
    ],
)
def test_invalid_files_are_a_user_error(tmp_path: Path, tasks: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        load_tasks(config(tmp_path, tasks))


def test_missing_tasks_option_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"webarena\.tasks is not set"):
        load_tasks(WebArenaConfig())


def test_missing_file_of_tasks_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="FileNotFoundError"):
        load_tasks(WebArenaConfig(tasks=str(tmp_path / "none.json")))


async def test_missing_sites_are_a_user_error(monkeypatch) -> None:
    with pytest.raises(UserError, match="there are no sites"):
        await WebArenaEnv(None, WebArenaConfig()).setup()


def test_judge_is_a_seat_only_if_configured() -> None:
    assert WebArenaEnv(None, WebArenaConfig()).seats == ("agent",)
    assert WebArenaEnv(None, WebArenaConfig(judge=True)).seats == ("agent", "judge")
