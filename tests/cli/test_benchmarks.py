"""The benchmark presets score rows in the published form: self-written rows, right and wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from arealite.api.agent import agents
from arealite.api.episode import Action
from arealite.cli.main import main
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent
from tests.ext.evaluation.sampled import no_servers
from tests.models import tiny_model

PRESETS = Path(__file__).parents[2] / "config/env"
HUMANEVAL = [
    {
        "task_id": "Test/0",
        "prompt": "from typing import List\n\n\ndef total(values: List[int]) -> int:\n"
        '    """ Add all numbers.\n    >>> total([1, 2])\n    3\n    """\n',
        "entry_point": "total",
        "canonical_solution": "    result = 0\n    for each in values:\n"
        "        result += each\n    return result\n",
        "test": "\n\nMETADATA = {\n    'author': 'us'\n}\n\n\ndef check(candidate):\n"
        "    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    },
    {
        "task_id": "Test/1",
        "prompt": "def is_even(n):\n    return n % 2 == 0\n\n\n"
        'def evens(values):\n    """ Keep the even numbers. """\n',
        "entry_point": "evens",
        "canonical_solution": "    return [x for x in values if is_even(x)]\n",
        "test": "def check(candidate):\n    for n in range(4):\n"
        "        assert candidate(range(n)) == [x for x in range(n) if x % 2 == 0]\n",
    },
    {
        "task_id": "Test/2",
        "prompt": 'def half(x: float) -> float:\n    """ Divide by two. """\n',
        "entry_point": "half",
        "canonical_solution": "    return x / 2\n",
        "test": "def check(candidate):\n    assert abs(candidate(3) - 1.5) < 1e-6, 'three'\n",
    },
]
PARTLY = "    return 3\n"
"""Passes one of two asserts of the first problem."""
GSM8K = [
    {
        "question": "Ada buys 3 pens for 4 dollars each. How many dollars does she pay?",
        "answer": "Each pen costs 4 dollars.\nSo she pays 3 * 4 = <<3*4=12>>12 dollars.\n#### 12",
    },
    {
        "question": "A town of 2,400 people grows by half. How many people live there then?",
        "answer": "Half of 2,400 is 1,200.\n2,400 + 1,200 = 3,600\n#### 3,600",
    },
    {"question": "Ben owes 5 dollars. What is his balance?", "answer": "#### -5"},
]


@agents.register("reciting")
class Reciting(MathCodeSingleStepAgent):
    """An agent that gives the answer of a test to each prompt."""

    answers: ClassVar[dict[str, str]] = {}

    async def act(self, observation: Any) -> Action:
        action = await super().act(observation)
        return Action(Reciting.answers[str(observation)], action.response)


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that evaluates rows with given answers and returns the rewards."""
    no_servers(monkeypatch)
    model = tiny_model(tmp_path / "model", max_position_embeddings=2048)

    def run(preset: str, name: str, rows: list[dict[str, Any]], answers: list[str]) -> list[float]:
        file, out = tmp_path / f"{preset}.jsonl", tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = [row.get("prompt") or row["question"] for row in rows]
        Reciting.answers = dict(zip(prompts, answers, strict=True))
        words = [
            *("--config", str(PRESETS / f"{preset}.yaml"), f"model.path={model}"),
            *(f"cluster.run_root={tmp_path / 'runs'}", f"cluster.name_root={tmp_path / 'names'}"),
            "trainer.ppo.collector.agent.type=reciting",
            "trainer.ppo.collector.client.type=scripted",
            "trainer.ppo.collector.env.code.sandbox.backend=unsafe",
            f"name={name}",
        ]
        code = main(["collect", *words, f"dataset.train={file}", f"out={out}"])
        assert code == 0, capsys.readouterr()
        return [json.loads(line)["reward"] for line in out.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    "form", ["{solution}", "I sum up.\n```python\n{prompt}{solution}```\nDone."]
)
def test_humaneval_row_scores_1_for_its_solution_and_0_for_a_wrong_one(rewards, form: str) -> None:
    right = [
        form.format(prompt=row["prompt"], solution=row["canonical_solution"]) for row in HUMANEVAL
    ]
    assert rewards("humaneval", "right", HUMANEVAL, right) == [1.0, 1.0, 1.0]
    wrong = [PARTLY, "    return []\n", "    return ("]
    assert rewards("humaneval", "wrong", HUMANEVAL, wrong) == [0.0, 0.0, 0.0]


def test_gsm8k_row_scores_1_for_its_number_and_0_for_another(rewards) -> None:
    right = [GSM8K[0]["answer"], "So \\boxed{3600}", "The answer is -5."]
    assert rewards("gsm8k", "right", GSM8K, right) == [1.0, 1.0, 1.0]
    assert rewards("gsm8k", "wrong", GSM8K, ["#### 13", "\\boxed{2400}", "5"]) == [0.0, 0.0, 0.0]
