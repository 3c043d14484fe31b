"""Solve word problems of `gsm_symbolic`, a dataset of reasoning-gym with 85 templates.

Held-out tasks have the same templates as the tasks that are trained, and other numbers. The
demonstrations are the equations of the dataset's own solutions, without their sentences. About a
tenth of the tasks has none: those of some templates, and those whose equations are rounded.
"""

import random
import re
from collections.abc import Sequence

from arealite.api.reward import Score
from arealite.api.tool import ToolError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.demo.lesson import Lesson, LessonMessage, LessonRow, assistant_message
from arealite.ext.tools.calculator import evaluate

NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
SIGNED_NUMBER = re.compile(rf"(?<![\d.])-?{NUMBER}")
EQUATION = re.compile(rf"\(?{NUMBER}(?:[-+*/]\(?{NUMBER}\)?)+={NUMBER}")
CURRENCIES_AND_COMMAS = re.compile(r"[$€£]|(?<=\d),(?=\d{3})")
UNITS = re.compile(r"(?<=\d)(?: [A-Za-z]+(?:/[A-Za-z]+)?){1,3}(?= ?[-+*/=] ?\(?[\d.])")
"""The words between a number and an operator."""
REWRITES = (
    (CURRENCIES_AND_COMMAS, ""),
    (re.compile(r"(?<=\d) ?[x×] ?(?=\d)"), "*"),
    (re.compile("×"), "*"),
    (re.compile("÷"), "/"),
    (re.compile(r"(\d)%"), r"\1/100"),
    (UNITS, ""),
    (re.compile(r" ?([-+*/=()]) ?"), r"\1"),
)
"""Patterns and their replacements, in order, that turn sentences into arithmetic."""
STRICT_ANSWER = re.compile(rf"#### ?-?{NUMBER}$")
REQUEST = " Write the calculations, then #### and the result."
NUM_ENTRIES = 1000


def draw(rng: random.Random) -> LessonRow:
    """Draw a task."""
    reasoning_gym = import_optional("reasoning_gym", extra_requirement("envs"))
    seed = rng.getrandbits(32)
    dataset = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=NUM_ENTRIES)
    # Entry 0 is left out: it draws its numbers and its template with the same seed.
    entry = dataset[rng.randrange(1, NUM_ENTRIES)]
    truth = entry["answer"]
    return {
        "prompt": [{"role": "user", "content": entry["question"] + REQUEST}],
        "ground_truth": truth,
        "solution": short_solution(entry["metadata"]["answer_cot"], truth),
    }


def short_solution(sentences: str, truth: str) -> str:
    """Return the right equations and the answer; "" if the last equation does not give it."""
    candidates = dict.fromkeys(EQUATION.findall(_as_arithmetic(sentences)))
    equations = [equation for equation in candidates if _is_right(equation)]
    if not equations or not _is_right(f"{equations[-1].partition('=')[2]}={truth}"):
        return ""
    return f"{' '.join(equations)} #### {truth}"


def _as_arithmetic(sentences: str) -> str:
    """Return sentences whose equations have only numbers and + - * / ( ) =."""
    arithmetic = sentences
    for pattern, replacement in REWRITES:
        arithmetic = pattern.sub(replacement, arithmetic)
    return arithmetic


def _is_right(equation: str) -> bool:
    left, _, right = equation.partition("=")
    try:
        return evaluate(left) == evaluate(right)
    except ToolError:
        return False


def demonstrate(row: LessonRow) -> Sequence[LessonMessage]:
    """Return the short solution of a task, or nothing."""
    return [assistant_message(row["solution"])] if row["solution"] else []


def numbers_of(row: LessonRow) -> tuple[str, ...]:
    """Return the numbers of a task. Tasks with equal numbers and other names count as one."""
    return tuple(re.findall(NUMBER, row["prompt"][-1]["content"]))


def right_number(completion: str, ground_truth: str) -> Score:
    """Return 1 if the last number is right. Part `strict`: also, the text ends with #### NUMBER."""
    plain_answer = CURRENCIES_AND_COMMAS.sub("", completion.strip())
    numbers = SIGNED_NUMBER.findall(plain_answer)
    is_right = bool(numbers) and float(numbers[-1]) == float(ground_truth)
    is_strict = is_right and STRICT_ANSWER.search(plain_answer) is not None
    return Score(float(is_right), strict=float(is_strict))


LESSON = Lesson(
    about="solve word problems of gsm_symbolic",
    draw=draw,
    key=numbers_of,
    reward=f"{__name__}:right_number",
    package="reasoning_gym",
    demonstrate=demonstrate,
    demonstrations=3072,
    warm_start=[
        "trainer.offline.lr=2e-4",
        "trainer.offline.batch_size=16",
        "trainer.offline.max_steps=160",
        "trainer.offline.optimizer.warmup_steps=8",
    ],
    train_rows=2048,
    eval_rows=500,
    max_new_tokens=64,
    max_eval_tokens=128,
    shown_parts=["strict"],
    options=[
        "trainer.ppo.collector.concurrency=64",
        "trainer.ppo.total_steps=16",
        "trainer.ppo.batch_size=128",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.warmup_steps=4",
        "trainer.ppo.advantage.type=dr_grpo",
    ],
)
