"""The answer of a completion that counts, in thousands of synthetic and manual completions."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from arealite.ext.math.checker import is_equal
from arealite.ext.math.math_verify import MathVerifyReward
from arealite.ext.math.reward_options import MathVerifyConfig
from tests.ext.math.made_answers import CHEATS, FORMS, Row, cheats, rows

COUNT = 1100


async def missed(made: list[Row]) -> list[Row]:
    """Return the rows with a wrong reward."""
    reward = MathVerifyReward(MathVerifyConfig(workers=2, timeout_s=600.0))
    await reward.setup()
    try:
        scores = await asyncio.gather(*(reward.score(row.completion, row.truth) for row in made))
    finally:
        await reward.close()
    return [row for row, score in zip(made, scores, strict=True) if score != float(row.is_right)]


@pytest.mark.parametrize("form", FORMS)
async def test_right_synthetic_answers_score_1_and_wrong_ones_0(form: str) -> None:
    made = list(rows(form, COUNT))
    assert Counter(row.is_right for row in made) == {True: COUNT // 2, False: COUNT // 2}
    assert len({row.completion for row in made}) > 0.9 * COUNT
    assert await missed(made) == []


async def test_synthetic_cheats_score_0() -> None:
    assert len(CHEATS) > 100
    assert await missed(list(cheats(8 * len(CHEATS)))) == []


KELSEY = "If Kelsey answered 35+8=43 correctly, she missed 83-43=40.\n"


@pytest.mark.parametrize(
    ("completion", "truth"),
    [
        (f"{KELSEY}#### 40", "40"),
        (f"{KELSEY}#### 40\n\nI hope that this answer of 3 lines helps.", "40"),
        (f"{KELSEY}\\boxed{{40}}", "40"),
        (f"{KELSEY}So it is 40.", "40"),
        ("The answer is 3.\n#### 40", "40"),
        ("#### 3\n#### 40", "40"),
        ("\\boxed{3}\n#### 40", "40"),
        ("#### 3\nNo: \\boxed{40}", "40"),
        ("#### Step 1: add\n35 + 5 = 40\n#### Step 2: be glad\nThe answer is 40.", "40"),
        ("#### 1. Add 35 and 5\nThe answer is 40.", "40"),
        ("I tried \\boxed{3}, which is wrong: it does not divide 80, as two halves of it would "
         "have to. So it is \\boxed{40}.", "40"),
        ("The answer is 3. Wait. The answer is 40.", "40"),
        ("8 - 3 = 5, 5 * 8 = 40", "40"),
        ("The answer is clear: it is 40, as 35 + 5 = 39 + 1.", "40"),
        ("40", "foo 3 bar\n#### 40"),
        ("\\boxed{\\boxed{40}}", "40"),
        ("50%", "0.5"),
        ("0.5", "50%"),
        ("50%", "50"),
        ("50", "50\\%"),
        ("0.3333333", "\\frac{1}{3}"),
        (".5", "0.50"),
        ("-0", "0"),
        ("\\boxed{1.5e3}", "1500"),
        ("\\boxed{1.5 \\times 10^{3}}", "1500"),
        ("\\boxed{1}, \\boxed{2}", "\\{1, 2\\}"),
        ("Kim answered $x+1$. So we get $x + 2$.", "2 + x"),
        ("The answer is $x + 2$, and not $x$.", "2 + x"),
        ("\\boxed{x + 2}", "2 + x"),
    ],
)  # fmt: skip
def test_right_answer_is_found_in_each_form(completion: str, truth: str) -> None:
    assert is_equal(completion, truth) is True


@pytest.mark.parametrize(
    ("completion", "truth"),
    [
        (f"{KELSEY}#### 40", "43"),
        (f"{KELSEY}So it is 40.", "43"),
        ("\\boxed{40}\n#### 43", "40"),
        ("#### 40\n\\boxed{43}", "40"),
        ("The answer is 40.\n#### 43", "40"),
        ("0.33", "\\frac{1}{3}"),
        ("0", "0.0000001"),
        ("5000%", "50%"),
        ("\\boxed{x}", "x = 5"),
        ("\\boxed{0 = 0}", "x = 5"),
        ("\\boxed{0 < 1}", "x < 5"),
        ("\\boxed{\\{1, 2, 3\\}}", "\\{1, 2\\}"),
        ("\\boxed{(1, 3)}", "(1, 2)"),
        ("\\boxed{\\frac{0}{0}}", "x + 1"),
        ("\\boxed{\\frac{0}{0}}", "\\sqrt{2}"),
        ("\\boxed{\\infty - \\infty}", "\\sqrt{2}"),
        ("\\boxed{\\sqrt{2} \\text{ or } \\sqrt{3}}", "\\sqrt{2}"),
        ("$\\sqrt{2}$ or $\\sqrt{3}$", "\\sqrt{2}"),
        ("\\boxed{y}", "x"),
        ("\\boxed{x, y}", "x"),
        ("Solve for x.", "x"),
    ],
)
def test_wrong_answers_are_not_equal(completion: str, truth: str) -> None:
    assert is_equal(completion, truth) is False


LONG = (
    "x" * 300_000, " " * 300_000, "\n" * 300_000, "(" * 300_000, "1 " * 30_000, "1," * 30_000,
    "\\boxed{" * 30_000, "####\n" * 30_000, "answer is " * 30_000, "\\frac{1" * 30_000,
    "1(" * 30_000, "or " * 30_000, "ab cd " * 30_000, "1 or " * 30_000, "1=" * 30_000,
    "1 abc " * 30_000, "100,000," * 30_000,
)  # fmt: skip


async def test_long_texts_take_less_than_the_cpu_seconds_of_a_check() -> None:
    reward = MathVerifyReward(MathVerifyConfig(timeout_s=30.0))
    try:
        scores: list[float] = [await reward.score(f"{text}\n7 5", "5") for text in LONG]
    finally:
        await reward.close()
    assert not any(hasattr(score, "parts") for score in scores), "all were checked"
    assert scores == [0.0] * len(LONG)
