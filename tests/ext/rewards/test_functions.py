"""Plain functions and TRL's reward functions score rows; an unusable function is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.api.reward import RewardConfig, Score, make_reward
from arealite.api.task import Task
from arealite.base.config_tree import check_constraints
from arealite.base.errors import EpisodeError, UserError
from arealite.base.registry import import_user_module
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.ext.rewards.process_pool import FunctionFailed

SOURCE = """
import asyncio
import numpy as np
from arealite.api.reward import Reward, Score
from arealite.base.errors import RewardTimeout

def plain(completion, ground_truth):
    return completion == ground_truth

async def slow(completion, ground_truth):
    await asyncio.sleep(0)
    return 0.5

def with_columns(completion, difficulty, extra_info, topic="none"):
    return difficulty + len(extra_info) + len(topic)

def everything(completion, **kwargs):
    return Score(1.0, **{name: 1.0 for name in sorted(kwargs)})

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "s" and solution_str == ground_truth)

def trl(prompts, completions, answer, **kwargs):
    return [0.25]

def trl_arguments(prompts, completions, answer, **kwargs):
    raise RewardTimeout(repr((prompts, completions, answer, sorted(kwargs))))

async def trl_async(completions, **kwargs):
    return [None]

def trl_state(completions, trainer_state, **kwargs):
    return [0.0]

def no_opinion(completion):
    return None

def text(completion):
    return "1.0"

def two(completions, **kwargs):
    return [1.0, 2.0]

def not_a_list(completions, **kwargs):
    return 1.0

def numpy_number(completion):
    return np.float32(0.5)

def numpy_list(completions, **kwargs):
    return [np.float32(0.5)]

def broken(completion):
    return completion.no_such

def stops(completion):
    return next(iter([]))

def leaves(completion):
    raise SystemExit(1)

def timed_out(completion):
    raise RewardTimeout("no answer")

def value(completion):
    return 2.0

class Callable:
    async def __call__(self, completion):
        return 3.0

instance = Callable()

class Whole(Reward):
    async def score(self, completion, ground_truth):
        return Score(2.0, inner=1.0)

def positional(c, g, /):
    return 1.0

def unnamed(answer, truth):
    return 1.0

number = 3
"""
TASK = Task(
    task_id="train-0",
    prompt="2+2?",
    ground_truth="4",
    extra_info={"data_source": "s"},
    columns={"difficulty": 3, "answer": "four"},
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mine") / "my_reward_functions.py"
    file.write_text(SOURCE)
    return file


def made(file: Path, *names: str, weights: list[float] | None = None) -> Any:
    paths = [f"{file}:{name}" for name in names]
    options = FunctionRewardConfig(paths=paths, weights=weights or [])
    return make_reward(RewardConfig(type="function", function=options))


async def scored(file: Path, *names: str, task: Task = TASK, completion: str = "4") -> Score:
    reward = made(file, *names)
    await reward.setup()
    try:
        return await reward.score_task(completion, task)
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", 1.0),
        ("slow", 0.5),
        ("with_columns", 3 + 1 + 4),
        ("verl", 1.0),
        ("trl", 0.25),
        ("trl_async", None),
        ("no_opinion", None),
        ("numpy_number", 0.5),
        ("numpy_list", 0.5),
        ("instance", 3.0),
        ("Whole", 2.0),
    ],
)
async def test_function_scores_a_completion(file: Path, name: str, expected: float | None) -> None:
    assert await scored(file, name) == expected


async def test_module_path_finds_an_installed_function(file: Path) -> None:
    import_user_module(str(file), "test")  # its folder is importable from here on
    options = FunctionRewardConfig(paths=["my_reward_functions:plain"])
    reward = make_reward(RewardConfig(type="function", function=options))
    assert [await reward.score("4", "4"), await reward.score("5", "4")] == [1.0, 0.0]
    await reward.close()


async def test_trl_function_gets_lists_of_one_row(file: Path) -> None:
    names = ["data_source", "difficulty", "extra_info", "ground_truth", "prompt"]
    with pytest.raises(EpisodeError) as caught:
        await scored(file, "trl_arguments")
    assert str(caught.value) == repr((["2+2?"], ["4"], ["four"], names))
    chat = Task(
        task_id="t",
        prompt=[{"role": "user", "content": "2+2?"}],
        ground_truth="4",
        extra_info={},
        columns={"answer": "four"},
    )
    said = [{"role": "assistant", "content": "4"}]
    with pytest.raises(EpisodeError) as caught:
        await scored(file, "trl_arguments", task=chat)
    names = ["extra_info", "ground_truth", "prompt"]
    assert str(caught.value) == repr(([chat.prompt], [said], ["four"], names))


async def test_kwargs_get_all_columns_and_scores_keep_their_parts(file: Path) -> None:
    parts = (await scored(file, "everything")).parts
    assert parts.keys() == {
        *("everything", "answer", "difficulty", "data_source"),
        *("completion", "solution_str", "prompt", "ground_truth", "extra_info"),
    } - {"completion"}


async def test_weighted_sum_has_the_unweighted_results_as_parts(file: Path) -> None:
    reward = made(file, "plain", "slow", "no_opinion", "value", weights=[2.0, -1.0, 9.0, 10.0])
    score = await reward.score_task("4", TASK)
    await reward.close()
    assert score == 2.0 * 1 - 0.5 + 20.0
    assert score.parts == {"plain": 1.0, "slow": 0.5, "value_": 2.0}


async def test_equal_names_have_parts_of_their_own(file: Path) -> None:
    assert (await scored(file, "plain", "plain")).parts == {"plain": 1.0, "plain_": 1.0}
    assert (await scored(file, "Whole")).parts == {"inner": 1.0, "Whole": 2.0}


async def test_completion_has_no_score_if_no_weighted_function_scores_it(file: Path) -> None:
    reward = made(file, "no_opinion", "trl_async")
    assert await reward.score_task("4", TASK) is None
    await reward.close()
    reward = made(file, "no_opinion", "value", weights=[1.0, 0.0])
    assert await reward.score_task("4", TASK) is None
    await reward.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", r":broken raised AttributeError: .*no_such.* \(.*my_reward_functions.py:\d+\)"),
        ("stops", "raised StopIteration"),
        ("leaves", "raised SystemExit: 1"),
        ("text", "returned '1.0', and must return a number or None"),
        ("two", r"returned \[1.0, 2.0\], and must return a list with one number per completion"),
        ("not_a_list", "returned 1.0, and must return a list"),
    ],
)
async def test_failing_function_fails_the_episode(file: Path, name: str, says: str) -> None:
    with pytest.raises(FunctionFailed, match=says) as caught:
        await asyncio.wait_for(scored(file, name), 60)
    assert caught.value.failure_class == "reward_function"


async def test_episode_error_of_a_function_keeps_its_class(file: Path) -> None:
    with pytest.raises(EpisodeError) as caught:
        await scored(file, "timed_out")
    assert caught.value.failure_class == "reward_timeout"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{file}:plane", "Unknown function 'plane'. Did you mean 'plain'?"),
        ("{file}:number", "Unknown function 'number'"),
        ("{file}", "Unknown function"),
        ("plain", "names no function. Write module:name or file.py:name."),
        ("no_such_module:f", "no module of that name. It must be importable"),
        ("{folder}/none.py:f", "no module of that name"),
        ("{folder}/math.py:f", "another module has the name math. Rename the file"),
        ("{folder}/bad.py:f", "/bad.py:1)"),
        ("{file}:positional", "none is named `completion`. Write def f(completion, ground_truth)"),
        ("{file}:unnamed", "its parameters are (answer, truth), and none is named `completion`"),
    ],
)
def test_unusable_path_is_refused(
    file: Path, path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "math.py").write_text("def f(completion): return 1.0")
    (tmp_path / "bad.py").write_text("undefined")
    path = path.format(file=file, folder=tmp_path)
    if path == str(file):
        path = f"{file}:"
    with pytest.raises(UserError) as caught:
        make_reward(RewardConfig(type="function", function=FunctionRewardConfig(paths=[path])))
    assert str(caught.value).startswith(f"reward.function.paths={path}")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    if "math.py" in path:
        assert str(tmp_path) not in sys.path, "a process started later would import this math"


@pytest.mark.parametrize(
    ("name", "task", "says"),
    [
        (
            "trl_state",
            TASK,
            "missing a required argument: 'trainer_state'. The row has the columns ground_truth, ",
        ),
        (
            "with_columns",
            Task(task_id="t", prompt="p", ground_truth="4", extra_info={}),
            "argument: 'difficulty'",
        ),
        (
            "plain",
            Task(task_id="t", prompt="p", ground_truth=None, extra_info={}),
            "argument: 'ground_truth'. The row has the columns none",
        ),
    ],
)
async def test_row_without_a_required_column_is_refused(
    file: Path, name: str, task: Task, says: str
) -> None:
    reward = made(file, "slow" if task.ground_truth else "no_opinion", name)
    with pytest.raises(EpisodeError, match=says) as caught:
        await reward.check_row(task)
    assert "Give the parameter a default, or name its column: dataset.columns" in str(caught.value)
    await reward.check_row(TASK) if name != "trl_state" else None
    await reward.close()


@pytest.mark.parametrize(("paths", "weights"), [([], []), (["a:b"], [1.0, 2.0])])
def test_missing_functions_and_weights_are_refused(paths: list[str], weights: list[float]) -> None:
    function = FunctionRewardConfig(paths=paths, weights=weights)
    with pytest.raises(UserError, match="name functions, and one weight for each function or none"):
        make_reward(RewardConfig(type="function", function=function))


def test_functions_of_another_type_are_refused() -> None:
    config = RewardConfig(function=FunctionRewardConfig(paths=["a:b"]))
    says = r"type=math_verify uses no function.paths=\['a:b'\]. Set type=function"
    with pytest.raises(UserError, match=says):
        check_constraints(config, "")
