"""Debates: observations, scores by rules, and verdicts of a model."""

from __future__ import annotations

import pytest

from arealite.base.errors import UserError
from arealite.ext.games.debate.env import JudgeUnreadable
from arealite.ext.games.debate.rules import WORDS, content, judge
from tests.ext.games.players import Player, first_rows, make, task

CLAIM = "Cities should close their centres to private cars."
GOOD = (
    "First, private cars poison the air of our cities, because engines burn fuel where people "
    "breathe. According to a survey of 2019, thirty percent of centres measured dangerous dust. "
    "Second, streets without cars sell more, for example in Ghent, where shops grew. Therefore "
    "cities should close their centres. Finally, children play outside again."
)
BAD = "No. I disagree."


class Judge(Player):
    trainable = False


async def debate(pro, con, *, verdicts=None, **options: object):
    seats = {"pro": Player(pro), "con": Player(con)}
    if verdicts is not None:
        seats["judge"] = Judge(verdicts)
        options["judge"] = "model"
    env = make("debate", **{"words": 50, "rounds": len(pro)} | options)
    assert env.seats == tuple(seats)
    await env.run(task(CLAIM), **seats)
    return seats


async def test_both_sides_see_rules_claim_and_all_speeches() -> None:
    seats = await debate(["Pro one.", "Pro two."], ["Con one.", "Con two."])
    for side in ("pro", "con"):
        for number, seen in enumerate(seats[side].seen, start=1):
            assert f"Claim: {CLAIM}" in seen.content
            assert "2 speeches a side" in seen.content
            assert f"You are {side}. Give your speech {number}" in seen.content
    first, second = (seen.content for seen in seats["pro"].seen)
    assert "one." not in first
    assert "[pro, speech 1] Pro one.\n[con, speech 1] Con one.\n" in second
    assert "[pro, speech 2] Pro two." in seats["con"].seen[1].content


async def test_better_speech_wins() -> None:
    seats = await debate([GOOD], [BAD], win_reward=2.0)
    pro, con = seats["pro"].parts, seats["con"].parts
    scores = {
        "length",
        "evidence",
        "reasoning",
        "structure",
        "relevance",
        "consistency",
        "coverage",
    }
    assert {*pro} == {*con} == scores | {"score", "win"}
    assert (pro["win"], con["win"]) == (1, 0)
    assert seats["pro"].rewards == [pytest.approx(pro["score"] + 2)]
    assert seats["con"].rewards == [pytest.approx(con["score"] - 2)]
    assert all(0 <= parts[name] <= 1 for parts in (pro, con) for name in scores)


async def test_near_scores_are_a_draw() -> None:
    seats = await debate([GOOD], [GOOD], win_margin=0.5)
    for side in ("pro", "con"):
        assert seats[side].parts["win"] == 0
        assert seats[side].rewards == [pytest.approx(seats[side].parts["score"])]


def scores(*own: str, other: tuple[str, ...] = (), first: bool = True, words: int = 50):
    return judge(CLAIM, own, other, words=words, first=first)


def test_each_score_rewards_its_quality() -> None:
    good, bad = scores(GOOD), scores(BAD)
    for name in ("length", "evidence", "reasoning", "structure", "relevance"):
        assert good[name] > bad[name] + 0.3, name
    assert scores("") == dict.fromkeys(scores("")) | dict.fromkeys(good, 0.0) | {"coverage": 0.5}


def test_repeated_words_do_not_raise_the_length_score() -> None:
    assert scores("cars " * 60)["length"] == 0
    assert scores(GOOD * 5)["length"] == 0
    assert scores("a b c d", words=4)["length"] == 1


def test_conceding_or_repeating_lowers_consistency() -> None:
    again = "Cars poison the air, and streets without private cars sell more."
    kept = scores(GOOD, again)["consistency"]
    assert kept == 1
    assert scores(GOOD, GOOD)["consistency"] == 0.5
    assert scores(GOOD, f"{again} But you are right.")["consistency"] < kept
    assert scores("I concede.")["consistency"] == 0


def test_coverage_counts_words_of_the_other_side() -> None:
    reply = "My opponent speaks of dust, shops and children, yet buses carry nobody at night."
    assert scores(reply, other=(GOOD,), first=False)["coverage"] == 1
    assert scores("Something else entirely.", other=(GOOD,), first=False)["coverage"] == 0
    assert scores(GOOD, other=(GOOD,), first=False)["coverage"] == 0
    assert scores(GOOD, other=(reply,))["coverage"] == 0.5
    assert scores(GOOD, reply, other=(GOOD, ""))["coverage"] == 1


async def test_model_judges_in_both_orders() -> None:
    verdicts = ["pro=9 con=5", "Pro is weak.\nPRO: 7, CON: 6.5"]
    seats = await debate(["A"], ["B"], verdicts=verdicts, win_reward=1.0)
    assert seats["pro"].parts == {"judge": 0.8, "score": 0.8, "win": 1}
    assert seats["con"].parts == {"judge": 0.575, "score": 0.575, "win": 0}
    assert (seats["pro"].rewards, seats["con"].rewards) == ([1.8], [pytest.approx(-0.425)])
    one, other = (seen.content for seen in seats["judge"].seen)
    assert one.index("[pro, speech 1] A") < one.index("[con, speech 1] B")
    assert other.index("[con, speech 1] B") < other.index("[pro, speech 1] A")
    assert seats["judge"].rewards == [0, 0]


@pytest.mark.parametrize("verdict", ["", "pro wins", "pro=5", "pro=50 con=5", "pro= con="])
@pytest.mark.parametrize("place", [0, 1])
async def test_unreadable_verdict_fails_the_episode(verdict: str, place: int) -> None:
    verdicts = ["pro=5 con=5", "pro=5 con=5"]
    verdicts[place] = verdict
    with pytest.raises(JudgeUnreadable) as raised:
        await debate(["A"], ["B"], verdicts=verdicts)
    assert raised.value.failure_class == "judge_unreadable"


async def test_trained_judge_is_a_user_error() -> None:
    env = make("debate", judge="model", rounds=1)
    with pytest.raises(UserError, match=r"seats\.judge"):
        await env.run(task(CLAIM), pro=Player(["A"]), con=Player(["B"]), judge=Player(["x"]))


async def test_claim_may_be_a_message() -> None:
    pro = Player(["A"])
    message = [{"role": "user", "content": CLAIM}]
    await make("debate", rounds=1).run(task(message), pro=pro, con=Player(["B"]))
    assert f"Claim: {CLAIM}\n" in pro.seen[0].content


def test_topics_are_split_shuffled_and_endless() -> None:
    topics = WORDS["topics"]
    assert len({*topics}) == len(topics) == 40
    assert all(len(content(topic)) >= 2 for topic in topics)
    env = make("debate")
    train = [row["prompt"] for row in first_rows(env, 64)]
    held_out = [row["prompt"] for row in first_rows(env, 8, split="eval")]
    assert train[:32] != train[32:] and sorted(train[:32]) == sorted(train[32:])
    assert {*train} | {*held_out} == {*WORDS["topics"]} and not {*train} & {*held_out}
    assert train != [row["prompt"] for row in first_rows(env, 64, seed=2)]
