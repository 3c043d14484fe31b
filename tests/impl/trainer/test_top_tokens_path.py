"""The most probable tokens on their path: server, client, turns, payload, rows of the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from arealite.api.agent import Agent
from arealite.api.engine import Sequence
from arealite.api.episode import Action, Seat
from arealite.api.llm import LLMClientConfig, SamplingConfig
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import decode_turn, encode_turn
from arealite.ext.embedded.weight_loading import load_model
from arealite.ext.step_metrics.token_metrics import token_metrics, token_sums
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout.collector import make_trajectory, tree_of
from arealite.system.ledger.payload_checks import find_mismatch
from tests.fakes.embedded import running, server_config
from tests.impl.trainer.test_routing_path import rows_of, settings
from tests.models import tiny_model
from tests.payloads import change_turn

NUM_TOP = 8
VOCAB = 64
ENDS = [2, 7]


class Talker(Agent):
    """Plays three turns: the second extends the first, the third forks from it."""

    sampling = SamplingConfig()

    async def act(self, observation: object) -> Action:
        first = [5, 6, 7, 8]
        answer = await self.generate(first, sampling=self.sampling)
        for question in ([9, 10, 11], [12, 13]):
            await self.generate(first + answer.output_ids + question, sampling=self.sampling)
        return Action("")


async def play(
    tmp_path: Path, sampling: SamplingConfig, *, pause_mode: str = ""
) -> tuple[Talker, TrajectoryHeader, Payload, Any]:
    """Play one episode on an embedded server, which is paused in the first turn."""
    model = tiny_model(tmp_path / "model")
    config = settings(model, tmp_path / "names", "ignore")
    async with running(server_config(str(model), config.cluster.name_root)) as server:
        client = ServersClient(config, LLMClientConfig())
        await client.start()
        agent = Talker(None, client=client, tokenizer=None, seat=Seat())  # type: ignore[arg-type]
        agent.sampling = sampling
        playing = asyncio.create_task(agent.act(None))
        if pause_mode:
            while not server.engine.decoder.running and not playing.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.wrap_future(server.pause(pause_mode))
            await asyncio.wrap_future(server.engine.call(server.engine.resume))
        await playing
        await client.close()
    task = Task(task_id="t", prompt="", ground_truth=None, extra_info={})
    lease = Lease(lease_id="l", group_id="g", split="train", task=task, members=[0], version=0)
    header, payload = make_trajectory(lease, 0, agent, tree_of(agent), seconds=1.0)
    return agent, header, payload, config


@torch.inference_mode()
def check_rows(model: Any, row: Sequence, sampling: SamplingConfig) -> None:
    """Compare a row with the softmax of its tokens, in float64."""
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    logits_TV = model(ids[None]).logits[0].double() / sampling.temperature
    probs_TV = logits_TV.softmax(-1).numpy()
    top_logprobs_TK = row.fields["behav_top_logprobs"]
    assert row.top_ids is not None
    assert row.top_ids.shape == top_logprobs_TK.shape == (len(ids), NUM_TOP)
    assert (row.top_ids.dtype, top_logprobs_TK.dtype) == (np.int32, np.float32)
    for i in np.flatnonzero(row.loss_mask):
        probs_V = probs_TV[i - 1]
        order = np.argsort(-probs_V)[: sampling.top_k if sampling.top_k > 0 else None]
        exact_V = probs_V / probs_V[order].sum()
        expected = order[:NUM_TOP]
        found = row.top_ids[i][row.top_ids[i] >= 0]
        assert found.tolist() == expected.tolist()
        logprobs = top_logprobs_TK[i][: len(expected)]
        np.testing.assert_allclose(logprobs, np.log(exact_V[expected]), atol=1e-5)
        sampled = np.log(exact_V[row.tokens[i]])
        np.testing.assert_allclose(row.fields["behav_logprobs"][i], sampled, atol=1e-5)
    assert (row.top_ids[~row.loss_mask] == -1).all()
    assert np.isneginf(top_logprobs_TK[~row.loss_mask]).all()


@pytest.mark.parametrize("pause_mode", ["", "abort", "retract"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=12, top_logprobs=NUM_TOP, temperature=0.8),
        SamplingConfig(max_new_tokens=12, top_logprobs=NUM_TOP, top_k=5),
    ],
)
async def test_rows_of_an_interrupted_episode_are_exact(
    tmp_path: Path, sampling: SamplingConfig, pause_mode: str
) -> None:
    agent, header, payload, config = await play(tmp_path, sampling, pause_mode=pause_mode)
    assert find_mismatch(header, payload, vocab_size=64) == ""
    batch = rows_of(header, payload, config)
    model = load_model(config.model.path, dtype="float32", device="cpu")[0]
    assert len(batch.rows) == 2
    for row in batch.rows:
        check_rows(model, row, sampling)
        if not sampling.truncates:
            assert row.is_truncated is None
            continue
        assert row.is_truncated is not None
        assert row.is_truncated.tolist() == row.loss_mask.tolist()
    metrics = token_metrics(*token_sums(batch))
    assert metrics.get("mismatch/unknown_set_frac") == (0.0 if sampling.truncates else None)
    turn = agent.record.turns[1]
    assert decode_turn(encode_turn(turn)).response.top_ids == turn.response.top_ids != b""


async def test_tokens_whose_set_is_unknown_are_not_trained(tmp_path: Path) -> None:
    sampling = SamplingConfig(max_new_tokens=12, top_logprobs=NUM_TOP, top_k=NUM_TOP + 1)
    _, header, payload, config = await play(tmp_path, sampling)
    assert find_mismatch(header, payload) == ""
    batch = rows_of(header, payload, config)
    assert not any(row.loss_mask.any() for row in batch.rows)
    assert token_metrics(*token_sums(batch))["mismatch/unknown_set_frac"] == 1.0


async def test_truncated_tokens_without_top_logprobs_are_not_trained(tmp_path: Path) -> None:
    """A run of this kind is refused; an agent may choose such sampling for one request."""
    _, header, payload, config = await play(tmp_path, SamplingConfig(max_new_tokens=12, top_k=5))
    batch = rows_of(header, payload, config)
    for row in batch.rows:
        assert row.top_ids is None and "behav_top_logprobs" not in row.fields
        assert not row.loss_mask.any()
    assert token_metrics(*token_sums(batch))["mismatch/unknown_set_frac"] == 1.0


async def test_without_top_logprobs_nothing_is_stored(tmp_path: Path) -> None:
    _, header, payload, config = await play(tmp_path, SamplingConfig(max_new_tokens=12))
    batch = rows_of(header, payload, config)
    for row in batch.rows:
        assert (row.top_ids, row.is_truncated) == (None, None)
        assert row.loss_mask.any() and "behav_top_logprobs" not in row.fields
    assert "mismatch/unknown_set_frac" not in token_metrics(*token_sums(batch))
    assert all(not turn.extras for turn in TrajectoryTree.decode(payload).turns)


@pytest.mark.parametrize("pause_mode", ["", "abort", "retract"])
@pytest.mark.parametrize("num_top", [NUM_TOP, VOCAB])
async def test_first_min_new_tokens_are_trained_where_all_but_end_tokens_are_recorded(
    tmp_path: Path, num_top: int, pause_mode: str
) -> None:
    sampling = SamplingConfig(
        max_new_tokens=12, min_new_tokens=5, stop_token_ids=ENDS[1:], top_logprobs=num_top
    )
    _, header, payload, config = await play(tmp_path, sampling, pause_mode=pause_mode)
    batch = rows_of(header, payload, config)
    model = load_model(config.model.path, dtype="float32", device="cpu")[0]
    num_first = 0
    for row, segment in zip(batch.rows, batch.local[0].segments, strict=True):
        assert row.is_truncated is not None and row.top_ids is not None
        logits_TV = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
        for turn in segment.turns:
            first = slice(turn.start, turn.start + min(5, turn.length))
            later = slice(first.stop, turn.start + turn.length)
            num_first += min(5, turn.length)
            assert row.is_truncated[first].all() and not row.is_truncated[later].any()
            assert row.loss_mask[later].all()
            assert row.loss_mask[first].all() == (num_top == VOCAB)
            assert not np.isin(row.top_ids[first], ENDS).any()
            logits_NV = logits_TV[first.start - 1 : first.stop - 1].detach().double()
            logits_NV[:, ENDS] = -np.inf
            exact_NV = logits_NV.log_softmax(-1).numpy()
            sampled_N = exact_NV[np.arange(len(exact_NV)), row.tokens[first]]
            np.testing.assert_allclose(row.fields["behav_logprobs"][first], sampled_N, atol=1e-5)
    unknown = token_metrics(*token_sums(batch))["mismatch/unknown_set_frac"]
    assert unknown == (0.0 if num_top == VOCAB else 1.0)
    assert batch.local[0].num_truncated == num_first


async def test_stored_rows_are_checked_and_take_8_bytes_each(tmp_path: Path) -> None:
    sampling = SamplingConfig(max_new_tokens=12, top_logprobs=NUM_TOP)
    _, header, payload, _ = await play(tmp_path, sampling)
    turns = TrajectoryTree.decode(payload).turns
    extras = turns[0].extras
    num_bytes = sum(map(len, extras.values()))
    assert num_bytes == 8 * NUM_TOP * len(turns[0].ids) // 4
    bare = msgspec.structs.replace(header, digest=b"")  # else each change is "garbled"

    def flaw(**changes: bytes) -> str:
        changed = change_turn(payload, 0, extras=extras | changes)
        return find_mismatch(bare, changed, vocab_size=64)

    ids = np.frombuffer(extras["top_ids"], "<i4").copy()
    ids[3] = 64
    assert flaw(top_ids=ids.tobytes()) == "most probable tokens"
    assert flaw(top_ids=extras["top_ids"][4:]) == "arrays of other lengths"
    logprobs = np.frombuffer(extras["top_logprobs"], "<f4").copy()
    logprobs[2] = np.nan
    assert flaw(top_logprobs=logprobs.tobytes()) == "most probable tokens"
    logprobs[2] = -1.0
    assert flaw(top_logprobs=logprobs.tobytes()).startswith("receipt: answer")
    assert flaw() == ""


def test_turns_of_different_widths_are_padded(tmp_path: Path) -> None:
    """A run that was resumed with another `top_logprobs` has both in its ledger."""
    sampling = SamplingConfig(max_new_tokens=6, top_logprobs=NUM_TOP)
    _, header, payload, config = asyncio.run(play(tmp_path, sampling))
    turn = TrajectoryTree.decode(payload).turns[1]
    num_sampled = len(turn.ids) // 4
    narrow = {
        name: np.frombuffer(values, "<i4").reshape(num_sampled, -1)[:, :3].tobytes()
        for name, values in turn.extras.items()
    }
    changed = change_turn(payload, 1, extras=narrow, answer_digest=b"", prompt_digest=b"")
    for index in (0, 2):
        changed = change_turn(changed, index, answer_digest=b"", prompt_digest=b"")
    batch = rows_of(msgspec.structs.replace(header, digest=b""), changed, config)
    (row, _) = batch.rows
    assert row.top_ids is not None
    widths = (row.top_ids >= 0).sum(1)[row.loss_mask].tolist()
    assert {*widths} == {3, NUM_TOP}
