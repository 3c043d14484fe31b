"""Solve word problems of `gsm_symbolic`, a dataset of reasoning-gym with 85 templates.

Held-out tasks have the same templates, and other numbers than the tasks that are trained. The
demonstrations are the equations of the dataset's own solutions, without their sentences. Tasks
whose equations do not lead to the answer, about a third, have no demonstration.
"""

import random
import re
from collections.abc import Sequence

from arealite.api.reward import Score
from arealite.api.tool import ToolError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.demo.lesson import Lesson, Message, Row, answered
from arealite.impl.tool.calculator import evaluate

NUMBER = r"\d+(?:\.\d+)?"
EQUATION = re.compile(rf"\(?{NUMBER}(?:[-+*/]\(?{NUMBER}\)?)+={NUMBER}")
STRICT = re.compile(rf"#### ?(-?{NUMBER})$")
ASK = " Write the calculations, then #### and the result."


def draw(rng: random.Random) -> Row:
    """Draw a task.

    Raises:
        UserError: reasoning-gym is not installed.
    """
    gym = import_optional("reasoning_gym", extra_requirement("envs"))
    entry = gym.create_dataset("gsm_symbolic", seed=rng.getrandbits(32), size=1)[0]
    truth = entry["answer"]
    return {
        "prompt": [{"role": "user", "content": entry["question"] + ASK}],
        "ground_truth": truth,
        "solution": short_solution(entry["metadata"]["answer_cot"], truth),
    }


def short_solution(sentences: str, truth: str) -> str:
    """Return the equations of a solution and its answer; "" if they do not lead to it."""
    text = re.sub(r"[$€£ ]|(?<=\d),(?=\d{3})", "", sentences)
    text = text.replace("×", "*").replace("÷", "/")
    text = re.sub(r"(\d)%", r"\1/100", text)
    equations = [each for each in dict.fromkeys(EQUATION.findall(text)) if _is_right(each)]
    if not equations or not _is_right(f"{equations[-1].partition('=')[2]}={truth}"):
        return ""
    return f"{' '.join(equations)} #### {truth}"


def _is_right(equation: str) -> bool:
    left, _, right = equation.partition("=")
    try:
        return evaluate(left) == evaluate(right)
    except ToolError:
        return False


def demonstrate(row: Row) -> Sequence[Message]:
    """Return the short solution of a task, or nothing."""
    return [answered(row["solution"])] if row["solution"] else []


def numbers_of(row: Row) -> tuple[str, ...]:
    """Return the numbers of a task: with other names, it is still the same task."""
    return tuple(re.findall(NUMBER, row["prompt"][-1]["content"]))


def right_number(completion: str, ground_truth: str) -> Score:
    """Return 1 if the last number is right (lenient); strict: it stands at the end, after ####."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", completion.strip())
    numbers = re.findall(rf"-?{NUMBER}", text)
    lenient = bool(numbers) and float(numbers[-1]) == float(ground_truth)
    strict = lenient and STRICT.search(text) is not None
    return Score(lenient, lenient=lenient, strict=strict)


LESSON = Lesson(
    about="solve word problems of gsm_symbolic",
    draw=draw,
    key=numbers_of,
    reward=f"{__name__}:right_number",
    package="reasoning_gym",
    demonstrate=demonstrate,
    demonstrations=1024,
    warm_start=[
        "trainer.offline.lr=1e-4",
        "trainer.offline.batch_size=16",
        "trainer.offline.max_steps=40",
        "trainer.offline.optimizer.warmup_steps=4",
    ],
    train_rows=2048,
    eval_rows=500,
    max_new_tokens=64,
    max_eval_tokens=192,
    parts=["strict"],
    options=[
        "trainer.ppo.total_steps=24",
        "trainer.ppo.batch_size=128",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.warmup_steps=4",
        "trainer.ppo.advantage.type=dr_grpo",
    ],
)
