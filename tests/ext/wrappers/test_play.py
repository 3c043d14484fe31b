"""Environments as Requests: reset and step, from threads and running event loops, and vectors."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from dataclasses import dataclass

import pytest

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.api.tool import tools
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.wrappers.play import Requests, make, make_vec
from tests.fakes import env_hosts
from tests.waiting import until_exited

assert env_hosts is not None  # registers the environments


@envs.register("host_pair")
class Pair(Env):
    """Both seats act at the same time. Counts the instances that are set up."""

    seats = ("left", "right")
    opened = 0
    barrier: asyncio.Barrier | None = None
    """All episodes wait here before they end."""

    async def setup(self) -> None:
        Pair.opened += 1

    async def run(self, task: Task, **agents: Agent) -> None:
        seen = Observation(task.text, ("a", "b"))
        left, right = await asyncio.gather(agents["left"].act(seen), agents["right"].act(seen))
        if Pair.barrier is not None:
            await Pair.barrier.wait()
        agents["left"].reward(1.0, same=left.text == right.text)
        agents["left"].reward(0.5)

    async def close(self) -> None:
        Pair.opened -= 1


def test_actors_in_turn_get_requests_and_their_rewards_at_the_end() -> None:
    with make("tic_tac_toe", opening_moves=0, win_reward=2.0) as env:
        assert env.actors == ("x", "o")
        requests = env.reset(seed=3)
        for move in "14253":
            (request,) = requests
            assert request.needs_action
            assert not request.done
            assert move in request.observation.choices
            assert f"You are {request.actor}." in str(request.observation)
            assert request.reward == 0.0
            requests = env.step({request.actor: move})
        x, o = requests
        assert (x.actor, x.reward, x.done, x.needs_action) == ("x", 2.0, True, False)
        assert (o.actor, o.reward, o.done, o.info) == ("o", -1.0, True, {"win": 0, "illegal": 0})
        assert x.episode_id == o.episode_id == request.episode_id
        assert env.reset(seed=3)[0].episode_id != x.episode_id


def test_actors_at_the_same_time_are_answered_in_one_step() -> None:
    with make("host_pair") as env:
        left, right = env.reset(task="choose")
        assert (left.needs_action, right.needs_action) == (True, True)
        left, right = env.step({"right": "b", "left": "b"})
        assert (left.reward, left.info, right.reward, right.info) == (1.5, {"same": 1.0}, 0.0, {})
        assert left.done
        assert right.done


def test_equal_seeds_give_equal_tasks_in_one_group() -> None:
    with make("math") as env:
        first, again, other, following = [env.reset(seed=n)[0] for n in (5, 5, 6, None)]
        assert str(first.observation) == str(again.observation) != str(other.observation)
        assert first.group_id == again.group_id != other.group_id
        assert env.reset(seed=7)[0].group_id == following.group_id


def test_task_is_a_row_or_a_prompt() -> None:
    with make("math", **{"reward.type": "exact_match"}) as env:
        (request,) = env.reset(task={"prompt": "1 + 1 =", "ground_truth": "2"})
        assert str(request.observation) == "1 + 1 ="
        assert env.step("2")[0].reward == 1.0
        with pytest.raises(UserError, match="`ground_truth` is int, must be a string"):
            env.reset(task={"prompt": "1 + 1 =", "ground_truth": 2})
        with pytest.raises(EpisodeError, match="has no ground_truth"):
            env.reset(task="1 + 1 =")


def test_text_calls_tools() -> None:
    with make("tools", tools=["calculator"]) as env:
        env.reset(seed=1)
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        (request,) = env.step(call)
        assert str(request.observation) == "tool: 42"
        assert request.observation.tools


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        ({"left": "a"}, r"'right' has no action\. .* needs one: left, right\."),
        ({"left": "a", "right": "b", "middle": "c"}, "'middle' does not have to act"),
        ("a", "'right' has no action"),
        ({"left": "a", "right": 3}, "the action of 'right' is 3. Give a text"),
    ],
)
def test_wrong_actions_are_a_user_error_and_change_nothing(actions: object, error: str) -> None:
    with make("host_pair") as env:
        env.reset(task="choose")
        with pytest.raises(UserError, match=error):
            env.step(actions)  # type: ignore[arg-type]
        assert env.step({"left": "a", "right": Action("b")})[0].done
        with pytest.raises(UserError, match="no episode is running"):
            env.step({"left": "a", "right": "b"})


def test_step_before_reset_and_after_close_is_a_user_error() -> None:
    env = make("host_pair")
    with pytest.raises(UserError, match=r"no episode is running\. Call reset"):
        env.step("a")
    env.reset(task="choose")
    env.close()
    with pytest.raises(UserError, match="no episode is running"):
        env.step({"left": "a", "right": "b"})


def test_failed_episode_raises_its_error_and_reset_begins_a_new_one() -> None:
    with make("host_moods") as env:
        env.reset(task="unlucky")
        with pytest.raises(EpisodeError, match="no luck today"):
            env.step("go")
        env.reset(task="fine")
        assert env.step("go")[0].reward == 1.0


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("tic_tac_to", {}, "Did you mean 'tic_tac_toe'"),
        ("math/hard", {}, "Unknown env type 'math/hard'"),
        ("tic_tac_toe", {"opening": 2}, r"tic_tac_toe: unknown key 'env\.tic_tac_toe\.opening'"),
        ("tic_tac_toe", {"opening_moves": "two"}, "opening_moves"),
        ("math", {"reward": print}, "math: Encoding objects of type"),
        ("math", {"runtime": {"type": "remote"}}, "needs env.runtime.addresses"),
        ("openenv/echo", {"addresses": []}, r"env\.openenv\.addresses=\[\]"),
        ("gymnasium/", {}, "Did you mean 'gymnasium'"),
    ],
)
def test_wrong_name_or_option_is_one_line(name: str, options: dict, error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        make(name, **options)
    assert "\n" not in str(raised.value)
    assert "command line" not in str(raised.value)


@dataclass(frozen=True)
class HammerConfig:
    """Options of a tool that only this process knows."""

    weight: int = 1


@pytest.mark.processes
def test_environment_in_a_child_process_is_played_and_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tools.configs, "hammer", HammerConfig)
    with make("host_moods", imports=[env_hosts.__name__], runtime={"type": "subprocess"}) as env:
        env.reset(task="pid")
        pid = int(str(env.step("go")[0].observation))
        assert pid != os.getpid()
    until_exited(pid)


async def test_make_works_in_a_running_event_loop_as_in_a_notebook() -> None:
    with make("reverse") as env:
        (request,) = env.reset(task="abc")
        assert str(request.observation)
        assert env.step("cba")[0].reward == 1.0


def test_threads_step_their_own_environments() -> None:
    won = list[float]()

    def play(seed: int) -> None:
        with make("tic_tac_toe", opening_moves=0) as env:
            env.reset(seed=seed)
            requests = [env.step(move) for move in "14253"][-1]
            won.append(requests[0].reward)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1.0] * 4


def _play_in_child(queue: multiprocessing.Queue[str]) -> None:
    with make("reverse") as env:
        queue.put(str(env.reset(task="abc")[0].observation))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_has_an_event_loop_of_its_own() -> None:
    with make("reverse") as env:
        env.reset(task="abc")
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_play_in_child, args=(queue,))
        child.start()
        assert queue.get(timeout=120)
        child.join()


def play(env: Requests, requests: list, answer: str = "a") -> list:
    """Answer until no request needs an action; return the requests of finished episodes."""
    finished = []
    while actions := {each.actor: answer for each in requests if each.needs_action}:
        requests = env.step(actions)
        finished += [each for each in requests if each.done]
    return finished


def test_vector_mixes_environments_and_numbers_their_actors() -> None:
    with make_vec([make("reverse"), "tic_tac_toe", "host_pair"]) as env:
        assert env.actors == (
            "agent::env=0", "x::env=1", "o::env=1", "left::env=2", "right::env=2"
        )  # fmt: skip
        requests = env.reset(task="abc")
        assert len({each.episode_id for each in requests}) == 3
        finished = play(env, requests)
        assert [each.actor for each in finished].count("agent::env=0") == 1
        assert {each.actor for each in finished} == {*env.actors}
        with pytest.raises(UserError, match="no episode is running"):
            env.step({})


def test_episodes_of_a_vector_run_concurrently_in_one_environment() -> None:
    Pair.barrier = asyncio.Barrier(3)  # opens when all three episodes are there
    try:
        with make_vec("host_pair", 3) as env:
            assert Pair.opened == 1
            requests = env.reset(task="choose")
            finished = env.step({each.actor: "a" for each in requests})
        assert len(finished) == 6
        assert all(each.done for each in finished)
        assert len({each.group_id for each in finished}) == 1
        assert Pair.opened == 0
    finally:
        Pair.barrier = None


def test_vector_resets_finished_episodes_by_itself() -> None:
    with make_vec("tic_tac_toe", 2, autoreset=True, opening_moves=0) as env:
        requests = env.reset(seed=1)
        for _ in range(2):  # "a" is illegal: it ends a game
            old = {each.episode_id for each in requests}
            requests = env.step({each.actor: "a" for each in requests if each.needs_action})
            ended = {each.episode_id for each in requests if each.done}
            begun = {each.episode_id for each in requests if each.needs_action}
            assert ended == {*old} & ended
            assert len(ended) == len(begun) == 2
            assert not ended & begun


def test_vector_takes_a_seed_for_each_environment() -> None:
    with make_vec("math", 4) as env:
        groups = [each.group_id for each in env.reset(seed=[1, 1, 2, 2])]
        assert groups[0] == groups[1] != groups[2] == groups[3]
        counted = [each.group_id for each in env.reset(seed=1)]
        assert (counted[0], counted[1]) == (groups[0], groups[2])
        with pytest.raises(UserError, match="3 seeds for 4 environments"):
            env.reset(seed=[1, 2, 3])
    with pytest.raises(UserError, match=r"n=0 copies of 'math'"):
        make_vec("math", 0)


def test_failed_episode_of_a_vector_raises_when_the_others_have_stepped() -> None:
    with make_vec([make("host_moods"), "host_pair"]) as env:
        requests = env.reset(task="unlucky")
        with pytest.raises(EpisodeError, match="no luck today"):
            env.step({each.actor: "a" for each in requests})
        assert len(env.reset(task="fine")) == 3


def test_environment_that_cannot_be_set_up_is_closed() -> None:
    @envs.register("host_unready")
    class Unready(Pair):
        async def setup(self) -> None:
            await super().setup()
            raise UserError("no display")

    with pytest.raises(UserError, match="no display"):
        make("host_unready")
    assert Pair.opened == 0
