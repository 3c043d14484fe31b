"""The divergence over the teacher's top k: values, gradients, and its way into loss and rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.losses import make_policy_loss
from arealite.api.algorithm import LossConfig
from arealite.api.engine import LossInput
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.base.errors import UserError
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.run_checks import check_run
from arealite.ext.distillation.teacher_scores import TOP_IDS, TOP_LOGPROBS, Scorer
from arealite.ext.distillation.token_divergence import divergence, loss_change
from arealite.impl.trainer.batch import make_train_batch
from arealite.impl.trainer.batch_advantages import compute_advantages
from arealite.system.ledger.payload_checks import decode_checked
from tests.ext.distillation.teachers import FACTS, Alone, collector, distilled, run_of, teacher
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease
from tests.impl.trainer.trajectories import batch
from tests.models import tiny_model

VOCAB = 6
KINDS = ["forward", "reverse"]
logits = st.lists(st.floats(-4, 4, allow_nan=False), min_size=VOCAB, max_size=VOCAB)


def naive(policy: list[float], taught: list[float], kind: str) -> float:
    """Return the KL divergence of two distributions, one outcome after the other."""
    pairs = zip(policy, taught, strict=True)
    if kind == "forward":
        return sum(t * math.log(t / p) for p, t in pairs)
    return sum(p * math.log(p / t) for p, t in pairs)


def with_tail(probs: list[float], top_k: int, order: list[int]) -> list[float]:
    kept = [probs[index] for index in order[:top_k]]
    return [*kept, 1 - sum(kept)] if top_k < len(probs) else kept


@pytest.mark.parametrize("kind", KINDS)
@given(logits, logits, st.integers(1, VOCAB))
def test_values_and_gradients_are_those_of_the_definition(
    kind: str, policy: list[float], taught: list[float], top_k: int
) -> None:
    policy_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logprobs_V = policy_V.log_softmax(0)
    teacher_V = torch.tensor(taught, dtype=torch.float64).log_softmax(0)
    order = teacher_V.argsort(descending=True).tolist()
    ids = order[:top_k]
    ours = divergence(logprobs_V[ids][None], teacher_V[ids][None], kind)[0]
    (gradient_V,) = torch.autograd.grad(ours, policy_V)

    def exact(change: float, index: int) -> float:
        shifted = [value + change * (i == index) for i, value in enumerate(policy)]
        total = sum(map(math.exp, shifted))
        probs = [math.exp(value) / total for value in shifted]
        return naive(
            with_tail(probs, top_k, order),
            with_tail(teacher_V.exp().tolist(), top_k, order),
            kind,
        )

    assert float(ours.detach()) == pytest.approx(
        exact(0.0, 0), abs=1e-4 if top_k == VOCAB else 1e-9
    )
    if top_k == VOCAB:  # the least probability of the tail has a gradient of its own
        return
    step = 1e-5
    for index in range(VOCAB):
        slope = (exact(step, index) - exact(-step, index)) / (2 * step)
        assert float(gradient_V[index]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_a_lower_bound_that_grows_with_top_k(kind: str) -> None:
    torch.manual_seed(0)
    policy_NV = torch.randn(50, 30, dtype=torch.float64).log_softmax(-1)
    teacher_NV = torch.randn(50, 30, dtype=torch.float64).log_softmax(-1)
    before_N = torch.zeros(50, dtype=torch.float64)
    for top_k in (1, 3, 9, 29):
        top_NK, ids_NK = teacher_NV.topk(top_k)
        now_N = divergence(policy_NV.gather(1, ids_NK), top_NK, kind)
        assert (now_N >= before_N - 1e-9).all()
        before_N = now_N
    first, second = (teacher_NV, policy_NV) if kind == "forward" else (policy_NV, teacher_NV)
    whole_N = (first.exp() * (first - second)).sum(-1)
    torch.testing.assert_close(before_N, whole_N, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_place_without_a_teacher_has_neither_value_nor_gradient(kind: str) -> None:
    policy_NK = torch.full((2, 3), -torch.inf)
    policy_NK[0] = torch.tensor([-1.0, -2.0, -3.0])
    policy_NK.requires_grad_()
    teacher_NK = torch.full((2, 3), -torch.inf)
    teacher_NK[0, :2] = torch.tensor([-0.5, -1.5])
    values_N = divergence(policy_NK, teacher_NK, kind)
    values_N.sum().backward()
    assert policy_NK.grad is not None
    assert values_N[1] == 0.0 and values_N[0] > 0.0
    assert (policy_NK.grad[1] == 0).all() and policy_NK.grad[0, 2] == 0
    assert policy_NK.grad.isfinite().all()


OPTIONS = DistillationConfig(teacher="/teacher", only=True, top_k=2, kl="forward", coef=0.5)


def test_divergence_is_added_to_the_loss_with_the_tokens_weights() -> None:
    torch.manual_seed(0)
    top_logprobs_NK = torch.randn(4, 5).log_softmax(-1)[:, :2].requires_grad_()
    fields = {
        "advantages": torch.zeros(4),
        "loss_weight": torch.tensor([0.5, 0.0, 0.25, 0.25]),
        "behav_logprobs": torch.zeros(4),
        "prox_logprobs": torch.zeros(4),
        TOP_LOGPROBS: torch.randn(4, 5).log_softmax(-1)[:, :2],
    }
    loss_input = LossInput(
        outputs={
            "logprobs": torch.zeros(4, requires_grad=True),
            "entropy": torch.zeros(4),
            "top_logprobs": top_logprobs_NK,
        },
        fields=fields,
        rows_N=torch.zeros(4, dtype=torch.long),
    )
    change = loss_change(PPOConfig(distillation=OPTIONS))
    assert change is not None
    loss, stats = change(make_policy_loss(LossConfig()))(loss_input)
    kl_N = divergence(top_logprobs_NK, fields[TOP_LOGPROBS], "forward")
    expected = (fields["loss_weight"] * kl_N).sum()
    torch.testing.assert_close(loss, 0.5 * expected)
    torch.testing.assert_close(stats["teacher_kl"], expected.detach())
    assert loss_change(PPOConfig(distillation=replace(OPTIONS, top_k=0, kl="reverse"))) is None
    assert loss_change(PPOConfig()) is None


def top_teacher(request: LLMRequest) -> LLMResponse:
    """Return one row less than `top_k` at each place; vLLM adds the prompt's own token."""
    answer = teacher(request)
    rows = [[(-0.1 * token, token, None), (-0.05, 3, None)] for token in request.input_ids[1:]]
    assert request.sampling.top_logprobs == 3
    return msgspec.structs.replace(answer, prompt_top_tokens=rows)


async def test_teachers_tokens_reach_the_rows_and_all_trajectories_are_trained() -> None:
    config = distilled(only=True, top_k=3)
    async with collector(config, lambda request: response([10, 11, 12])) as made:
        (change,) = made._tree_changes
        change.__self__._clients[""].script = top_teacher
        played = [await made.run(lease(7, members=2), member) for member in range(2)]
    tree, flaw = decode_checked(played[0][0].headers[0], played[0][1][0])
    assert flaw == ""
    ids_NK = np.frombuffer(tree.turns[0].extras[TOP_IDS], "<i4").reshape(3, 3)
    assert ids_NK.tolist() == [[3, token, -1] for token in (10, 11, 12)]
    pairs = [(episode.headers[0], ()) for episode, _ in played]
    plan, _ = batch(pairs)
    payloads = [payload for _, (payload,) in played]
    ppo = replace(config.trainer.ppo, batch_size=2)
    made_batch = make_train_batch(plan, payloads, ppo, rank=0, world_size=1)
    minibatches = compute_advantages(made_batch, ppo, Alone())  # type: ignore[arg-type]
    assert sum(len(minibatch.rows) for minibatch in minibatches) == 2
    for trajectory in made_batch.local:
        (row,) = trajectory.rows
        assert row.top_ids is not None
        assert row.top_ids[row.loss_mask].tolist() == ids_NK.tolist()
        assert (row.top_ids[~row.loss_mask] == -1).all()
        logprobs_NK = row.fields[TOP_LOGPROBS][row.loss_mask]
        assert logprobs_NK[:, 0] == pytest.approx([-0.05] * 3)
        assert np.isneginf(logprobs_NK[:, 2]).all()
        assert (trajectory.gather("advantages") == 0).all()


def teacher_of_targets(request: LLMRequest) -> LLMResponse:
    """Return scores of the request's own tokens; -1 gets none."""
    assert request.sampling.top_logprobs == 0
    ids_TK = np.array(request.target_ids)
    assert len(ids_TK) == len(request.input_ids) - 1
    logprobs_TK = np.where(ids_TK < 0, -np.inf, -0.1 * ids_TK)
    raw_logprobs = logprobs_TK.astype("<f4").tobytes()
    return msgspec.structs.replace(teacher(request), target_logprobs=raw_logprobs)


def recorded(request: LLMRequest, top_ids: list[list[int]]) -> LLMResponse:
    """Return an answer with the sampler's most probable tokens."""
    ids_NK = np.array(top_ids, "<i4")
    logprobs_NK = np.where(ids_NK < 0, -np.inf, -1.5).astype("<f4")
    return msgspec.structs.replace(
        response([10, 11, 12]), top_ids=ids_NK.tobytes(), top_logprobs=logprobs_NK.tobytes()
    )


async def test_policys_tokens_are_scored_by_the_teacher_and_reach_the_rows() -> None:
    config = distilled(only=True, top_k=2, top_k_of="policy")
    top_ids = [[10, 4], [5, 11], [12, -1]]
    async with collector(config, lambda request: recorded(request, top_ids)) as made:
        (change,) = made._tree_changes
        change.__self__._clients[""].script = teacher_of_targets
        played = [await made.run(lease(7, members=2), member) for member in range(2)]
    tree, flaw = decode_checked(played[0][0].headers[0], played[0][1][0])
    assert flaw == "" and TOP_IDS not in tree.turns[0].extras
    plan, _ = batch([(episode.headers[0], ()) for episode, _ in played])
    payloads = [payload for _, (payload,) in played]
    ppo = replace(config.trainer.ppo, batch_size=2)
    made_batch = make_train_batch(plan, payloads, ppo, rank=0, world_size=1)
    compute_advantages(made_batch, ppo, Alone())  # type: ignore[arg-type]
    for trajectory in made_batch.local:
        (row,) = trajectory.rows
        assert row.top_ids is not None
        assert row.top_ids[row.loss_mask].tolist() == top_ids
        assert (row.top_ids[~row.loss_mask] == -1).all()
        teacher_NK = row.fields[TOP_LOGPROBS][row.loss_mask]
        expected = [[-1.0, -0.4], [-0.5, -1.1], [-1.2, -np.inf]]
        np.testing.assert_allclose(teacher_NK, expected, rtol=1e-6)
        sampler_NK = row.fields["behav_top_logprobs"][row.loss_mask]
        assert (sampler_NK > -np.inf).tolist() == (teacher_NK > -np.inf).tolist()


async def test_answer_without_the_policys_tokens_fails_the_episode() -> None:
    config = distilled(only=True, top_k=2, top_k_of="policy")
    async with collector(config, lambda request: response([10])) as made:
        episode, payloads = await made.run(lease(7), 0)
    assert episode.failure is not None and "top_logprobs" in episode.failure.detail
    assert not payloads


async def test_teacher_of_the_tasks_source_scores_it() -> None:
    async with collector(experiment("world"), lambda request: response([10])) as made:
        episode, payloads = await made.run(lease(7), 0)
    tree, _ = decode_checked(episode.headers[0], payloads[0])
    clients = {source: ScriptedClient(teacher) for source in ("", "code")}
    scorer = Scorer(clients, DistillationConfig(teacher="/teacher", teachers={"code": "/other"}))
    for source in ("code", "math", "code"):
        task = Task(task_id="t", prompt="", ground_truth=None, extra_info={"data_source": source})
        await scorer.add_scores(task, tree)
    assert {source: len(client.requests) for source, client in clients.items()} == {
        "": 1,
        "code": 2,
    }


def test_folders_of_all_teachers_are_checked(tmp_path: Any) -> None:
    policy = tiny_model(tmp_path / "policy")
    other = tiny_model(tmp_path / "other", vocab_size=80)
    config = run_of(policy, policy, teachers={"code": str(other)})
    with pytest.raises(
        UserError, match=r"distillation\.teachers\.code=.* has 80 token ids, but model.path has 64"
    ):
        check_run(config, FACTS)


def test_two_kinds_of_most_probable_tokens_are_refused(tmp_path: Any) -> None:
    policy = tiny_model(tmp_path / "policy")
    config = run_of(policy, policy, top_k=5)
    ppo = config.trainer.ppo
    sampling = replace(ppo.collector.sampling, top_logprobs=20)
    ppo = replace(ppo, collector=replace(ppo.collector, sampling=sampling))
    config = replace(config, trainer=replace(config.trainer, ppo=ppo))
    with pytest.raises(UserError, match="Set one of them to 0"):
        check_run(config, FACTS)


@pytest.mark.parametrize(
    "recorded",
    [
        {"top_logprobs": 4},
        {"top_logprobs": 5, "top_p": 0.9},
        {"top_logprobs": 5, "min_new_tokens": 2},
    ],
)
def test_policys_tokens_need_as_many_records_of_the_sampler(
    tmp_path: Any, recorded: dict[str, Any]
) -> None:
    policy = tiny_model(tmp_path / "policy")
    config = run_of(policy, policy, top_k=5, top_k_of="policy")
    ppo = config.trainer.ppo

    def with_sampling(sampling: SamplingConfig) -> ExperimentConfig:
        changed = replace(ppo, collector=replace(ppo.collector, sampling=sampling))
        return replace(config, trainer=replace(config.trainer, ppo=changed))

    assert list(check_run(with_sampling(SamplingConfig(top_logprobs=5)), FACTS)) == []
    with pytest.raises(UserError, match=r"Set trainer\.ppo\.collector\.sampling\.top_logprobs=5"):
        check_run(with_sampling(SamplingConfig(**recorded)), FACTS)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"teachers": {"code": "/other"}}, "Set trainer.ppo.distillation.teacher"),
        ({"teacher": "/a", "kl": "forward"}, "Set trainer.ppo.distillation.top_k=20"),
        ({"teacher": "/a", "top_k_of": "policy"}, "Set trainer.ppo.distillation.top_k=20"),
        (
            {"teacher": "/a", "teachers": {"code": "/b"}, "addresses": ["h:1"]},
            "Leave them out, or teachers",
        ),
    ],
)
def test_options_that_need_another_one_are_refused(options: dict[str, Any], fix: str) -> None:
    broken = [text for is_met, text in DistillationConfig(**options).constraints() if not is_met]
    assert len(broken) == 1 and fix in broken[0]
