"""The collector turns episodes into trajectories and records failures."""

from __future__ import annotations

import asyncio
import gc
import random
import re

import msgspec
import numpy as np
import pytest

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.rollout_messages import Lease
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.turns import decode_turn
from arealite.base.errors import GenerationRefused, InvariantError, UserError
from arealite.ext.diagnosis import stacks
from arealite.impl.rollout.collector import Collector
from arealite.system.datapipe.message_checks import check_episode
from arealite.system.health import waits
from arealite.system.ledger.payload_checks import find_mismatch
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer
from tests.impl.rollout import worlds  # registers the environments
from tests.payloads import decode_segments
from tests.waiting import eventually

OUTPUT = [10, 11, 12]


def collector(env: str = "world", script=lambda request: response(OUTPUT), **settings) -> Collector:
    return Collector(experiment(env, **settings), ScriptedClient(script), tokenizer())


async def test_header_and_payload_of_an_episode() -> None:
    def script(request):
        return response(OUTPUT, version=4, stop_reason="length", interruptions=2)

    made = collector(script=script)
    episode, payloads = await made.run(lease(7, version=3), 5)
    assert (episode.lease_id, episode.group_id, episode.member) == ("l7", "g7", 5)
    assert episode.failure is None
    (header,), (payload,) = episode.headers, payloads
    (request,) = made._agents.client.requests
    assert header.trajectory_id == "g7/5/agent"
    assert (header.group_id, header.member, header.seat) == ("g7", 5, "agent")
    assert header.task_id == "train-7"
    assert header.reward == 3.0
    assert header.reward_parts == {"length": 1.0}
    assert header.segment_lengths == [len("hello") + 3]
    assert header.trained_tokens == 3
    assert (header.oldest_version, header.newest_version) == (4, 4)
    assert (header.turns, header.truncated, header.interruptions) == (1, True, 2)
    assert set(header.waits) == {"generation", "reward", "environment"}
    assert sum(header.waits.values()) == pytest.approx(header.seconds)
    (segment,) = decode_segments(payload)
    tokens = np.frombuffer(segment.tokens, "<i4").tolist()
    assert tokens == request.input_ids + OUTPUT
    assert segment.temperature == 1.0
    assert (request.group_id, request.min_version) == ("g7", 3)


async def test_numpy_rewards_are_converted_to_floats() -> None:
    episode, _ = await collector().run(lease(prompt="numpy"), 0)
    (header,) = episode.headers
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(header))
    assert (header.reward, header.reward_parts) == (3.5, {"length": 2.0})


@pytest.mark.parametrize("prompt", ["unscored", "unscored later"])
async def test_reward_of_none_leaves_the_episode_without_a_score(prompt: str) -> None:
    episode, payloads = await collector().run(lease(prompt=prompt), 0)
    (header,), (payload,) = episode.headers, payloads
    sent = msgspec.msgpack.encode(header)
    assert msgspec.msgpack.decode(sent, type=TrajectoryHeader).reward is None
    assert "length" in header.reward_parts
    (segment,) = decode_segments(payload)
    assert not any(segment.rewards)
    assert find_mismatch(header, payload) == ""
    assert check_episode(episode, payloads, newest=header.newest_version) == ""


async def test_each_episode_of_a_group_has_its_own_copy_of_the_row() -> None:
    made, shared = collector(), lease(prompt="changes")
    shared.task.extra_info["seen"] = []
    for member in range(3):
        episode, _ = await made.run(shared, member)
        assert episode.headers[0].reward_parts["seen"] == 1.0
    assert shared.task.extra_info["seen"] == []


async def test_evaluation_uses_its_own_sampling_options() -> None:
    made = collector()
    await made.run(lease(split="eval-10"), 0)
    await made.run(lease(), 0)
    evaluation, train = made._agents.client.requests
    assert (evaluation.sampling.temperature, train.sampling.temperature) == (0.0, 1.0)


async def test_request_ids_differ_between_episodes_turns_and_seats() -> None:
    made = collector("duel")
    for member in range(3):
        await made.run(lease(), member)
    ids = [request.request_id for request in made._agents.client.requests]
    assert len(set(ids)) == len(ids) == 12


@pytest.mark.parametrize(
    ("what", "kind", "detail"),
    [
        ("silent", "nothing_generated", "sampled no token"),
        ("crash", "error:KeyError", "lost"),
        ("own timeout", "error:TimeoutError", "the database"),
        ("check", "reward_timeout", "killed"),
        ("group", "reward_timeout", "in a group"),
        ("nan", "reward_not_finite", "finite"),
        ("nan part", "reward_not_finite", "finite"),
        ("exit", "error:SystemExit", "0"),
        ("panic", "error:Panic", "in Rust"),
        ("infinite", "reward_not_finite", "inf"),
        ("cancelled wait", "error:CancelledError", ""),
    ],
)
async def test_failed_episode_has_a_failure_class_and_detail(
    what: str, kind: str, detail: str
) -> None:
    episode, payloads = await collector().run(lease(prompt=what), 2)
    assert episode.failure is not None
    assert episode.failure.failure_class == kind
    assert detail in episode.failure.detail
    assert (episode.headers, payloads, episode.member) == ([], [], 2)


async def test_unexpected_error_has_its_file_and_line() -> None:
    episode, _ = await collector().run(lease(prompt="crash"), 0)
    assert episode.failure is not None
    assert re.search(r"KeyError: 'lost' \(/.*/worlds\.py:\d+\)$", episode.failure.detail)


@pytest.mark.parametrize("what", ["slow", "caught group, then slow"])
async def test_slow_episode_fails_at_episode_timeout_s(what: str) -> None:
    made = collector(episode_timeout_s=0.05)
    episode, _ = await asyncio.create_task(made.run(lease(prompt=what), 0))
    assert episode.failure is not None
    assert episode.failure.failure_class == "episode_timeout"


@pytest.mark.parametrize(
    ("what", "detail"), [("stubborn once", "s=0.05"), ("stubborn", "was abandoned")]
)
async def test_episode_that_swallows_its_timeout_gets_no_reward(
    what: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "END_S", 0.05)
    made = collector(episode_timeout_s=0.05)
    async with asyncio.timeout(60):
        episode, payloads = await made.run(lease(prompt=what), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "episode_timeout"
    assert episode.failure.detail.endswith(detail)
    assert (episode.headers, payloads) == ([], [])
    assert not made._running
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_episode_that_swallows_its_cancellation_is_abandoned() -> None:
    made = collector()
    running = asyncio.create_task(made.run(lease(prompt="stubborn"), 0))
    await eventually(lambda: "worlds.py" in stacks.task_path(running))
    running.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    made.abandon_running()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_failed_generation_sets_the_failure_class() -> None:
    episode, _ = await collector(script=lambda r: GenerationRefused("no")).run(lease(), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "generation_refused"


async def test_output_without_tokens_is_a_failure() -> None:
    episode, _ = await collector(script=lambda r: response([])).run(lease(), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "nothing_generated"


async def test_invariant_and_user_errors_are_raised() -> None:
    with pytest.raises(InvariantError):
        await collector().run(lease(prompt="broken"), 0)
    with pytest.raises(UserError):
        await collector(script=lambda r: ExceptionGroup("x", [UserError("u")])).run(lease(), 0)


@pytest.mark.parametrize("answer", [None, "43"])
async def test_agent_that_returns_no_action_is_a_user_error(answer, monkeypatch) -> None:
    monkeypatch.setattr(worlds.Wordless, "answer", answer)
    says = rf"Wordless\.act returned {answer!r}: an agent returns an Action"
    with pytest.raises(UserError, match=says):
        await collector(agent="wordless").run(lease(), 0)


async def test_episode_leaves_nothing_to_the_garbage_collector() -> None:
    made = collector("duel")
    await made.run(lease(), 0)  # fills caches
    gc.collect()
    gc.disable()
    try:
        episode, _ = await made.run(lease(), 1)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert episode.failure is None


async def test_each_seat_has_its_own_trajectory() -> None:
    episode, payloads = await collector("duel").run(lease(prompt="go"), 1)
    assert [h.trajectory_id for h in episode.headers] == ["g0/1/first", "g0/1/second"]
    assert [h.reward for h in episode.headers] == [1.0, -1.0]
    assert [h.turns for h in episode.headers] == [2, 2]
    assert all(h.segment_lengths == [5, 5] for h in episode.headers)
    rewards = [np.frombuffer(s.rewards, "<f4").sum() for s in decode_segments(payloads[0])]
    assert rewards == [0.0, 1.0]


async def test_seat_without_a_turn_has_no_trajectory() -> None:
    episode, payloads = await collector("one sided").run(lease(prompt="go"), 0)
    assert episode.failure is None
    assert [h.trajectory_id for h in episode.headers] == ["g0/0/first"]
    assert len(payloads) == 1


async def test_episode_without_a_trainable_seat_fails() -> None:
    episode, _ = await collector(agent="judge").run(lease(prompt="ok"), 0)
    assert episode.failure is not None
    assert "no trainable seat" in episode.failure.detail


async def test_step_environment_with_extending_turns_is_one_segment() -> None:
    episode, payloads = await collector("counter").run(lease(prompt="ab"), 0)
    (header,) = episode.headers
    assert (header.reward, header.turns, header.trained_tokens) == (1.5, 3, 9)
    (segment,) = decode_segments(payloads[0])
    mask = np.frombuffer(segment.loss_mask, "u1").tolist()
    assert mask == [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    rewards = np.frombuffer(segment.rewards, "<f4")
    assert np.flatnonzero(rewards).tolist() == [4, 8, 12]


async def test_custom_agent_overrides_prompt_and_parsing() -> None:
    made = collector(agent="shouting")
    episode, _ = await made.run(lease(prompt="go"), 0)
    assert episode.headers[0].reward == 6.0
    assert tokenizer().decode(made._agents.client.requests[0].input_ids) == "hello!"


async def test_environment_is_opened_and_closed_once() -> None:
    opened, closed = worlds.World.opened, worlds.World.closed
    made = collector()
    await made.setup()
    await made.run(lease(), 0)
    await made.run(lease(), 1)
    await made.close()
    assert (worlds.World.opened, worlds.World.closed) == (opened + 1, closed + 1)


async def test_failures_are_logged_once_per_class(capsys) -> None:
    made = collector()
    for member in range(5):
        await made.run(lease(prompt="crash"), member)
    seen = capsys.readouterr()
    assert (seen.out + seen.err).count("episode failed") == 1


async def test_running_episode_is_a_wait_for_its_environment() -> None:
    made = collector(episode_timeout_s=50.0)
    client = made._agents.client
    client.gate.clear()
    playing = asyncio.create_task(made.run(lease(3, prompt="ok"), 1))
    await client.received(1)
    (wait,) = made._running
    assert (wait.event, wait.on) == ("episode g3/1 (train-3)", "environment world")
    client.gate.set()
    await playing
    assert not made._running


# ---------------------------------------------------------------- resuming


def drawing(seed: int, *, version: int = 1):
    """Return a random policy, different for each worker."""
    dice = random.Random(seed)

    def script(request):
        resumed = request.resumed.output_ids if request.resumed else []
        ids = resumed + [dice.randrange(10, 40) for _ in range(4 - len(resumed))]
        logprobs = [-dice.random() for _ in ids]
        return LLMResponse(
            output_ids=ids,
            logprobs=logprobs,
            versions=[version] * len(ids),
            stop_reason="stop",
            interruptions=int(bool(resumed)),
        )

    return script


async def cut_off(made: Collector, work: Lease, *, at: int, partial=None) -> tuple[Lease, list]:
    """Run until generation `at` starts, then cancel; return a lease that resumes, and payloads."""
    client, standing = made._agents.client, asyncio.Event()
    answer, begun = client.generate, []

    async def generate(request):
        begun.append(request)
        if len(begun) > at:
            if partial is not None:
                request.on_partial(partial)
            standing.set()
            await asyncio.Event().wait()
        return await answer(request)

    client.generate = generate
    playing = asyncio.create_task(made.run(work, 0))
    await standing.wait()
    ((told, turns, payloads),) = made.progress(False)
    assert told is work
    assert list(made.progress(False)) == [], "only what is new"
    assert [turns for _, turns, _ in made.progress(True)] == [turns]
    playing.cancel()
    await asyncio.wait([playing])
    assert list(made.progress(True)) == [], "only of what still runs"
    return msgspec.structs.replace(work, lease_id="again", turns=turns), payloads


async def test_resumed_episode_contains_its_recorded_turns() -> None:
    first = collector("counter", script=drawing(1, version=3))
    again, payloads = await cut_off(first, lease(prompt="ab", version=3), at=2)
    assert [(t.seat, t.index) for t in again.turns] == [("agent", 0), ("agent", 1)]
    whole = [decode_turn(payload).response for payload in payloads]
    assert [(len(turn.output_ids), bool(turn.stop_reason)) for turn in whole] == [(4, True)] * 2
    assert {t.oldest_version for t in again.turns} == {3}
    second = collector("counter", script=drawing(2, version=4))
    episode, (payload,) = await second.run(again, 0, payloads)
    (header,), (segment,) = episode.headers, decode_segments(payload)
    assert [r.request_id for r in second._agents.client.requests] == ["again/0/agent/2"]
    assert (header.turns, header.reward, header.interruptions) == (3, 1.5, 0)
    assert (header.oldest_version, header.newest_version) == (3, 4)
    mask = np.frombuffer(segment.loss_mask, "u1") == 1
    sampled = [drawing(1)(request) for request in first._agents.client.requests[:1]]
    assert np.frombuffer(segment.tokens, "<i4")[mask][:4].tolist() == sampled[0].output_ids
    logprobs = np.array(sampled[0].logprobs, "<f4").tolist()
    assert np.frombuffer(segment.logprobs, "<f4")[mask][:4].tolist() == logprobs
    assert np.frombuffer(segment.versions, "<i4")[mask].tolist() == [3] * 8 + [4] * 4
    assert second.resumed == {"resumed_episodes": 1, "resumed_tokens": 8, "resumed_diverged": 0}


async def test_concurrent_generations_resume_by_their_prompts(monkeypatch) -> None:
    """Two workers die; the third finishes. Each records what ended, in another order."""
    kept = dict[int, tuple[object, bytes]]()
    sampled, dice = list[list[int]](), random.Random(5)
    work = lease(version=1)
    for allowed, order in (({5, 6}, (5, 6, 6, 7)), ({7}, (7, 6, 5, 6)), ({0}, (6, 7, 6, 5))):
        monkeypatch.setattr(worlds.Fan, "order", order)
        made, answered = collector("fan"), asyncio.Event()

        async def generate(request, allowed=allowed, answered=answered):
            if request.input_ids[1] not in allowed and 0 not in allowed:
                answered.set()  # the others have ended: this one never does
                await asyncio.Event().wait()
            sampled.append([dice.randrange(10, 40) for _ in range(3)])
            return response(sampled[-1])

        made._agents.client.generate = generate
        turns, payloads = zip(*kept.values(), strict=True) if kept else ((), ())
        again = msgspec.structs.replace(work, lease_id=f"l{len(kept)}", turns=[*turns])
        playing = asyncio.create_task(made.run(again, 0, payloads))
        if 0 in allowed:
            break
        await answered.wait()
        ((_, headers, frames),) = made.progress(False)
        kept |= {h.index: (h, frame) for h, frame in zip(headers, frames, strict=True)}
        playing.cancel()
        await asyncio.wait([playing])
    assert len(kept) == len(sampled) == 4, "no index is used twice"
    episode, (payload,) = await playing
    assert made.resumed == {"resumed_episodes": 1, "resumed_tokens": 12, "resumed_diverged": 0}
    assert (episode.headers[0].turns, len(sampled)) == (5, 5)
    trained = [
        np.frombuffer(segment.tokens, "<i4")[receipt.start :][: receipt.length].tolist()
        for segment in decode_segments(payload)
        for receipt in segment.turns
    ]
    assert sorted(trained) == sorted(sampled)
    assert find_mismatch(episode.headers[0], payload) == ""


async def test_turn_that_an_older_version_recorded_is_sampled_again() -> None:
    first = collector("counter", script=drawing(1))
    again, payloads = await cut_off(first, lease(prompt="ab"), at=2)
    older = {"prompt": bytes(16), "temperature": 1.0, "output_ids": bytes(4)}
    second = collector("counter", script=drawing(2))
    episode, _ = await second.run(again, 0, [msgspec.msgpack.encode(older), payloads[1]])
    assert episode.failure is None
    assert second._agents.client.requests[0].request_id == "again/0/agent/2"


async def test_different_prompt_drops_the_recorded_turns() -> None:
    first = collector("counter", script=drawing(1))
    again, payloads = await cut_off(first, lease(prompt="ab"), at=2)
    other = msgspec.structs.replace(again, task=lease(prompt="cd").task)
    second = collector("counter", script=drawing(2))
    episode, _ = await second.run(other, 0, payloads)
    assert episode.failure is None
    assert len(second._agents.client.requests) == 3
    assert all(request.resumed is None for request in second._agents.client.requests)
    assert second.resumed == {"resumed_episodes": 0, "resumed_tokens": 0, "resumed_diverged": 1}


async def test_different_temperature_drops_the_recorded_turns() -> None:
    first = collector("counter", script=drawing(1))
    again, payloads = await cut_off(first, lease(prompt="ab"), at=1)
    second = collector("counter", sampling=SamplingConfig(max_new_tokens=8, temperature=0.5))
    await second.run(again, 0, payloads)
    assert second.resumed["resumed_diverged"] == 1
    assert len(second._agents.client.requests) == 3


async def test_recorded_turns_after_a_missing_turn_are_not_used() -> None:
    first = collector("counter", script=drawing(1))
    again, payloads = await cut_off(first, lease(prompt="ab"), at=2)
    lacking = msgspec.structs.replace(again, turns=again.turns[1:])
    second = collector("counter", script=drawing(2))
    episode, _ = await second.run(lacking, 0, payloads[1:])
    assert episode.failure is None
    assert len(second._agents.client.requests) == 3
    assert second.resumed["resumed_tokens"] == 0


async def test_partial_generation_is_recorded_and_continued() -> None:
    partial = LLMResponse(
        output_ids=[11, 12],
        logprobs=[-0.5, -0.25],
        versions=[2, 3],
        stop_reason="",
        interruptions=1,
    )
    first = collector("counter")
    again, payloads = await cut_off(first, lease(prompt="ab"), at=0, partial=partial)
    assert [t.oldest_version for t in again.turns] == [2]

    second = collector("counter", script=drawing(2))
    episode, _ = await second.run(again, 0, payloads)
    assert second._agents.client.requests[0].resumed == partial
    assert episode.headers[0].interruptions == 1
    assert second.resumed["resumed_tokens"] == 2
    short = collector("counter", sampling=SamplingConfig(max_new_tokens=2), script=drawing(2))
    await short.run(again, 0, payloads)
    assert short._agents.client.requests[0].resumed is None, "as long as it may be, and not whole"


async def test_turns_of_unresumable_and_evaluation_episodes_are_not_recorded() -> None:
    for made, work in (
        (collector("world"), lease(prompt="slow")),
        (collector("counter"), lease(prompt="ab", split="eval-1")),
    ):
        client = made._agents.client
        client.gate.clear()
        playing = asyncio.create_task(made.run(work, 0))
        await client.received(1)
        assert list(made.progress(True)) == []
        assert not made._playing
        playing.cancel()
        await asyncio.wait([playing])
