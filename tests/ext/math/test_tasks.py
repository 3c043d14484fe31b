"""Generated questions: an independent computation gives the same answers."""

from __future__ import annotations

import random
import re

import pytest

from arealite.base.errors import UserError
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.math.env import MathEnv
from arealite.ext.math.math_tasks import KINDS, TOP, expression
from tests.ext.games.players import first_rows, make

MANY = 300


def questions(kind: str, level: int, count: int = MANY):
    rng = random.Random(f"{kind}/{level}")
    return [KINDS[kind](rng, level) for _ in range(count)]


@pytest.mark.parametrize("level", TOP)
def test_expressions_have_their_value(level: int) -> None:
    rng = random.Random(level)
    for _ in range(MANY):
        text, value = expression(rng, size=level + 1, top=TOP[level])
        assert eval(text) == value
        assert len(re.findall(r"\d+", text)) == level + 1


@pytest.mark.parametrize("level", TOP)
def test_equations_hold_for_their_answer(level: int) -> None:
    for text, answer in questions("algebra", level):
        given = re.search(r"(?:for \w: |If |that )(.*?)(?:, what is \w\?|\.$)", text)
        name = re.search(r"(?:for|is|Find) ([xyznk])\b", text)
        assert given and name, text
        holds = given[1].replace(" and ", " = ").split(" = ")
        python = [re.sub(r"(\d)([a-z(])", r"\1*\2", side) for side in holds]
        m = answer - int(holds[-1]) if level == 5 else 0  # the question ends with `x - m = number`
        sides = [eval(side, {name[1]: answer, "m": m}) for side in python]
        assert sides[::2] == sides[1::2], text


@pytest.mark.parametrize("level", TOP)
def test_stories_end_with_their_answer(level: int) -> None:
    for text, answer in questions("multi_step", level):
        first, *events, _ = text.split(". ")
        (have,) = map(int, re.findall(r"\d+", first))
        assert len(events) == level + 1
        for event in events:
            (number,) = map(int, re.findall(r"\d+", event))
            if "away" in event:
                have -= number
            elif "times" in event:
                have *= number
            elif "part" in event:
                have, rest = divmod(have, number)
                assert rest == 0
            else:
                have += number
        assert have == answer > 0, text


SITUATIONS = [
    (r"buys (\d+) \w+ for (\d+) .* pay\?", lambda n, p: n * p),
    (r"buys (\d+) \w+ for (\d+) .* with (\d+) .*back\?", lambda n, p, paid: paid - n * p),
    (r"goes (\d+) km .* for (\d+) km\?", lambda speed, far: far / speed),
    (r"goes (\d+) km .* in (\d+) hours", lambda speed, hours: speed * hours),
    (r"(\d+) friends share (\d+) .*over\?", lambda people, n: n % people),
    (r"(\d+) friends share (\d+) .*get\?", lambda people, n: n / people),
    (r"is (\d+) years old.* is (\d+) years older", lambda age, more: age + more),
    (r"is (\d+) years.* is (\d+) times.* in (\d+) years", lambda age, n, more: age * n + more),
    (r"area of (\d+) .* is (\d+) m wide.*perimeter", lambda area, w: 2 * (w + area / w)),
    (r"is (\d+) m wide and (\d+) m high.*perimeter", lambda w, h: 2 * (w + h)),
    (r"is (\d+) m wide and (\d+) m high.*area", lambda w, h: w * h),
]


@pytest.mark.parametrize("level", TOP)
def test_situations_have_their_answer(level: int) -> None:
    for text, answer in questions("word", level):
        read = [(solve, found) for shape, solve in SITUATIONS if (found := re.search(shape, text))]
        assert read, text
        solve, found = read[0]
        assert solve(*map(int, found.groups())) == answer, text


def test_higher_levels_have_larger_numbers() -> None:
    def largest(kind: str, level: int) -> int:
        return max(int(n) for text, _ in questions(kind, level) for n in re.findall(r"\d+", text))

    for kind in KINDS:
        assert largest(kind, 1) < largest(kind, 3) < largest(kind, 5)


def test_prompts_vary() -> None:
    for kind in KINDS:
        texts = [text for text, _ in questions(kind, 3)]
        assert len({*texts}) > 0.9 * MANY
        assert len({re.sub(r"\d+", "n", text)[:12] for text in texts}) >= 4


def test_rows_hold_kind_and_level_and_splits_share_no_question() -> None:
    env = make("math")
    train, held_out = first_rows(env, 2000), first_rows(env, 300, split="eval")
    assert train == first_rows(env, 2000)
    assert train != first_rows(env, 2000, seed=2)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert {row["extra_info"]["data_source"] for row in train} == {*KINDS}
    assert {row["extra_info"]["level"] for row in train} == {1, 2, 3}
    assert all(row["prompt"].endswith("\\boxed{}.") for row in train)
    assert all(int(row["ground_truth"]) is not None for row in train)


def test_rows_have_the_configured_kinds_and_levels() -> None:
    env = make("math", kinds=["algebra"], levels=[4], instruction="")
    rows = first_rows(env, 50)
    assert {(r["extra_info"]["data_source"], r["extra_info"]["level"]) for r in rows} == {
        ("algebra", 4)
    }
    assert not any("boxed" in row["prompt"] for row in rows)
    for options in ({"kinds": ["geometry"]}, {"levels": [6]}, {"levels": []}):
        with pytest.raises(UserError, match="questions"):
            next(MathEnv.rows(MathEnvConfig(**options), split="train", seed=1))


async def test_reward_is_1_for_the_truth_of_every_kind_and_level_and_0_for_another_number() -> None:
    env = make("math", levels=[*TOP])
    rows = first_rows(env, 200) + first_rows(env, 100, split="eval")
    found = {(row["extra_info"]["data_source"], row["extra_info"]["level"]) for row in rows}
    assert found == {(kind, level) for kind in KINDS for level in TOP}
    await env.setup()
    try:
        for row in rows:
            truth = row["ground_truth"]
            assert float(await env.scorer.score(f"So it is \\boxed{{{truth}}}.", truth)) == 1.0
            assert float(await env.scorer.score(f"\\boxed{{{int(truth) + 1}}}", truth)) == 0.0
    finally:
        await env.close()
