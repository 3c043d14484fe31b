"""Episodes become trajectories, and failures become data."""

from __future__ import annotations

import numpy as np
import pytest

from arealite.api.trajectory import decode_segments
from arealite.base.errors import GenerationRefused, InvariantError, UserError
from arealite.impl.rollout.collector import Collector
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer
from tests.impl.rollout import worlds  # registers the environments

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


async def test_evaluation_has_its_own_sampling() -> None:
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
        ("nan", "error:ValueError", "finite"),
        ("infinite", "reward_not_finite", "inf"),
        ("cancelled wait", "error:CancelledError", ""),
    ],
)
async def test_a_failed_episode_is_data(what: str, kind: str, detail: str) -> None:
    episode, payloads = await collector().run(lease(prompt=what), 2)
    assert episode.failure is not None
    assert episode.failure.failure_class == kind
    assert detail in episode.failure.detail
    assert (episode.headers, payloads, episode.member) == ([], [], 2)


async def test_a_slow_episode_fails_at_its_deadline() -> None:
    made = collector(episode_timeout_s=0.05)
    episode, _ = await made.run(lease(prompt="slow"), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "episode_timeout"


async def test_a_generation_that_fails_names_its_class() -> None:
    episode, _ = await collector(script=lambda r: GenerationRefused("no")).run(lease(), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "generation_refused"


async def test_an_output_without_tokens_is_a_failure() -> None:
    episode, _ = await collector(script=lambda r: response([])).run(lease(), 0)
    assert episode.failure is not None
    assert episode.failure.failure_class == "nothing_generated"


async def test_a_broken_invariant_stops_the_run() -> None:
    with pytest.raises(InvariantError):
        await collector().run(lease(prompt="broken"), 0)
    with pytest.raises(UserError):
        await collector(script=lambda r: ExceptionGroup("x", [UserError("u")])).run(lease(), 0)


async def test_each_seat_has_its_own_trajectory() -> None:
    episode, payloads = await collector("duel").run(lease(prompt="go"), 1)
    assert [h.trajectory_id for h in episode.headers] == ["g0/1/first", "g0/1/second"]
    assert [h.reward for h in episode.headers] == [1.0, -1.0]
    assert [h.turns for h in episode.headers] == [2, 2]
    assert all(h.segment_lengths == [5, 5] for h in episode.headers)
    rewards = [np.frombuffer(s.rewards, "<f4").sum() for s in decode_segments(payloads[0])]
    assert rewards == [0.0, 1.0]


async def test_an_env_of_judges_only_trains_nothing() -> None:
    episode, _ = await collector(agent="judge").run(lease(prompt="ok"), 0)
    assert episode.failure is not None
    assert "no trainable seat" in episode.failure.detail


async def test_a_step_env_whose_turns_extend_is_one_segment() -> None:
    episode, payloads = await collector("counter").run(lease(prompt="ab"), 0)
    (header,) = episode.headers
    assert (header.reward, header.turns, header.trained_tokens) == (1.5, 3, 9)
    (segment,) = decode_segments(payloads[0])
    mask = np.frombuffer(segment.loss_mask, "u1").tolist()
    assert mask == [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    rewards = np.frombuffer(segment.rewards, "<f4")
    assert np.flatnonzero(rewards).tolist() == [4, 8, 12]


async def test_a_users_agent_overrides_prompt_and_parsing() -> None:
    made = collector(agent="shouting")
    episode, _ = await made.run(lease(prompt="go"), 0)
    assert episode.headers[0].reward == 6.0
    assert tokenizer().decode(made._agents.client.requests[0].input_ids) == "hello!"


async def test_the_environment_is_opened_and_closed_once() -> None:
    opened, closed = worlds.World.opened, worlds.World.closed
    made = collector()
    await made.env.setup()
    await made.run(lease(), 0)
    await made.run(lease(), 1)
    await made.env.close()
    assert (worlds.World.opened, worlds.World.closed) == (opened + 1, closed + 1)


async def test_failures_are_logged_once_a_class(capsys) -> None:
    made = collector()
    for member in range(5):
        await made.run(lease(prompt="crash"), member)
    seen = capsys.readouterr()
    assert (seen.out + seen.err).count("episode failed") == 1
