"""Train the demo's task in one process: the real trainer and its engines, with the server's decode
loop as sampler.

A link samples batches in place of the datapipe, and a publisher copies the weights into the
sampler. The synchronous loop runs in seconds.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.payloads import Payload
from arealite.api.publisher import PublishReport, WeightPublisher
from arealite.api.trainer_messages import Batch, FromTrainer, StepReport, TrainerReady
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.base.config_tree import check_constraints
from arealite.cli.configs import CONFIG_DIR, load
from arealite.ext.distillation.teacher_scores import FIELD
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.weight_loading import load_model
from arealite.impl.trainer.base import Components, load_ppo_engines
from arealite.impl.trainer.ppo import PPOTrainer
from arealite.impl.trainer.rank_group import World
from tests.payloads import change_turn, encode_segments

MAX_NEW_TOKENS, STOP = 8, 1
SETTINGS = [
    "trainer.type=ppo",
    "trainer.ppo.lr=2e-4",
    "trainer.ppo.optimizer.warmup_steps=10",
    "trainer.ppo.batch_size=512",
    "trainer.ppo.updates=2",
    "trainer.ppo.total_steps=20",
    "trainer.ppo.critic.lr=1e-3",
    "trainer.ppo.checkpoint.export=false",
    f"trainer.ppo.collector.sampling.max_new_tokens={MAX_NEW_TOKENS}",
    f"trainer.ppo.eval.sampling.max_new_tokens={MAX_NEW_TOKENS}",
]


class Sampler(WeightPublisher):
    """A copy of the policy that answers questions; it is `staleness` versions behind."""

    def __init__(self, model: Path, *, seed: int, staleness: int, num_top: int = 0) -> None:
        self.model, self.tokenizer = load_model(str(model), dtype="float32", device="cpu")
        self.seed, self.version = seed, 0
        self.num_top = min(num_top, self.model.config.vocab_size)
        self.teacher: Any = None
        """Scores the answers; None: nothing does."""
        self.num_teacher_top = 0
        self.versions = deque[tuple[int, dict[str, torch.Tensor]]](maxlen=1 + staleness)
        """The newest versions; the oldest one of them answers."""

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        self.versions.append((version, {name: tensor.clone() for name, tensor in weights}))
        self.version, oldest = self.versions[0]
        self.model.load_state_dict(oldest)
        return False

    def load_newest(self) -> None:
        """Answer by the newest version from now on."""
        self.version, newest = self.versions[-1]
        self.model.load_state_dict(newest)

    def push(self, version: int) -> PublishReport:
        return PublishReport(version=version)

    def close(self) -> None:
        pass

    def answer(self, prompts: Sequence[str], *, round: int) -> list[Generation]:
        """Sample an answer to each prompt at temperature 1."""
        decoder = Decoder(self.model, max_rows=4096, seed=1000 * self.seed + round)
        asked = [
            Generation(
                rid=str(number),
                prompt=self.tokenizer.encode(prompt),
                sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
                limit=MAX_NEW_TOKENS,
                stops=frozenset([STOP]),
                num_top=self.num_top,
            )
            for number, prompt in enumerate(prompts)
        ]
        decoder.run(asked)
        if self.teacher is not None:
            with torch.inference_mode():
                self.score(asked)
        return asked

    def score(self, answered: Sequence[Generation]) -> None:
        """Set `prompt_logprobs` to the teacher's logprobs of the tokens of each answer."""
        rows = [torch.tensor([*answer.prompt, *answer.output]) for answer in answered]
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logprobs_BTV = self.teacher(input_ids=ids_BT).logits[:, :-1].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
        for answer, logprobs_T in zip(answered, logprobs_BT.tolist(), strict=True):
            begin = len(answer.prompt) - 1
            answer.prompt_logprobs = logprobs_T[begin : begin + len(answer.output)]
        if self.num_teacher_top:
            top_logprobs_BTK, top_ids_BTK = logprobs_BTV.topk(self.num_teacher_top)
            for row, answer in enumerate(answered):
                begin = len(answer.prompt) - 1
                span = slice(begin, begin + len(answer.output))
                top_rows = zip(top_ids_BTK[row, span], top_logprobs_BTK[row, span], strict=True)
                answer.prompt_top_tokens = [(ids.numpy(), top.numpy()) for ids, top in top_rows]

    def text(self, generation: Generation) -> str:
        return self.tokenizer.decode(generation.output, skip_special_tokens=True)


class Task:
    """A link with batches of sampled and scored answers, in place of the datapipe."""

    ticket = 0

    def __init__(self, kit: Path, config: ExperimentConfig, sampler: Sampler) -> None:
        lines = (kit / "train.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        random.Random(config.seed).shuffle(rows)
        self.rows, self.ppo, self.sampler = rows, config.trainer.ppo, sampler
        self.rounds = 0
        self.metrics: list[dict[str, float]] = []
        """The metrics of each step."""

    def start(self, step: int) -> TrainerReady:
        return TrainerReady(step=step, rolled_back_groups=0)

    def next_batch(self, step: int, **_: Any) -> tuple[Batch, list[Payload]]:
        groups, size = self.ppo.num_groups, self.ppo.collector.group_size
        played: list[tuple[TrajectoryHeader, Payload]] = []
        while len(played) < groups * size:
            rows, self.rows = self.rows[:groups], self.rows[groups:]
            asked = [row for row in rows for _ in range(size)]
            self.rounds += 1
            answers = self.sampler.answer([row["prompt"] for row in asked], round=self.rounds)
            for row in rows:
                own, answers = answers[:size], answers[size:]
                group = [episode(self.sampler, row, a, member=m) for m, a in enumerate(own)]
                rewards = {header.reward for header, _ in group}
                if not self.ppo.filter_zero_variance or len(rewards) > 1:
                    played += group
        played = played[: groups * size]
        headers, count = [header for header, _ in played], len(played)
        cut = [number // size * self.ppo.updates // groups for number in range(count)]
        made = Batch(
            step=step,
            headers=headers,
            ranks=[0] * count,
            minibatches=cut,
            mine=list(range(count)),
            waits={},
        )
        return made, [payload for _, payload in played]

    def report(self, message: FromTrainer) -> None:
        if isinstance(message, StepReport):
            self.metrics.append(message.metrics)

    def close(self) -> None: ...


def episode(
    sampler: Sampler, row: dict[str, str], answer: Generation, *, member: int
) -> tuple[TrajectoryHeader, Payload]:
    """Score an answer and encode it as a worker does."""
    reward = float(sampler.text(answer).strip() == row["ground_truth"])
    shown, sampled = len(answer.prompt), len(answer.output)
    made = Segment(
        tokens=np.array([*answer.prompt, *answer.output], "<i4").tobytes(),
        loss_mask=bytes(shown) + b"\x01" * sampled,
        logprobs=np.array([0.0] * shown + answer.logprobs, "<f4").tobytes(),
        versions=np.array([-1] * shown + [sampler.version] * sampled, "<i4").tobytes(),
        rewards=np.array([0.0] * (shown + sampled - 1) + [reward], "<f4").tobytes(),
        temperature=1.0,
    )
    version = sampler.version
    header = TrajectoryHeader(
        trajectory_id=f"{row['prompt']}/{member}/agent",
        group_id=row["prompt"],
        member=member,
        seat="agent",
        task_id=row["prompt"],
        reward=reward,
        reward_parts={},
        segment_lengths=[shown + sampled],
        trained_tokens=sampled,
        oldest_version=version,
        newest_version=version,
        turns=1,
        truncated=answer.finish is not None and answer.finish["type"] == "length",
        interruptions=0,
        seconds=0.0,
        waits={},
    )
    extras = dict[str, bytes]()
    if answer.prompt_logprobs:
        extras[FIELD] = np.array(answer.prompt_logprobs, "<f4").tobytes()
    for prefix, rows in (("", answer.top_tokens), ("teacher_", answer.prompt_top_tokens)):
        if rows:
            ids = np.array([ids_K for ids_K, _ in rows], "<i4")
            logprobs = np.array([logprobs_K for _, logprobs_K in rows], "<f4")
            extras[f"{prefix}top_ids"] = ids.tobytes()
            extras[f"{prefix}top_logprobs"] = logprobs.tobytes()
    return header, change_turn(encode_segments([made]), extras=extras)


def accuracy(kit: Path, sampler: Sampler) -> float:
    """Return the accuracy on the held-out questions, with four answers each."""
    rows = [json.loads(line) for line in (kit / "eval.jsonl").read_text().splitlines()] * 4
    answers = sampler.answer([row["prompt"] for row in rows], round=999)
    right = [
        sampler.text(answer).strip() == row["ground_truth"]
        for row, answer in zip(rows, answers, strict=True)
    ]
    return sum(right) / len(right)


class Learned(NamedTuple):
    """The result of a run."""

    before: float
    """Accuracy of the first policy."""
    after: float
    metrics: list[dict[str, float]]
    """The metrics of each step."""


def learn(
    kit: Path,
    run_root: Path,
    preset: str,
    *overrides: str,
    staleness: int = 0,
    seed: int = 1,
    teacher: Path | None = None,
) -> Learned:
    """Train the kit's model by a preset of config/algo, and by the scores of a teacher."""
    words = [*SETTINGS, f"model.path={kit / 'model'}", f"cluster.run_root={run_root}"]
    words += [f"seed={seed}", f"trainer.ppo.max_staleness={staleness}", *overrides]
    config = load(ExperimentConfig, CONFIG_DIR / "algo" / f"{preset}.yaml", words)
    check_constraints(config.trainer.ppo, "trainer.ppo.")
    world = World.init(threads=1, seed=seed)
    num_top = config.trainer.ppo.collector.sampling.top_logprobs
    sampler = Sampler(kit / "model", seed=seed, staleness=staleness, num_top=num_top)
    if teacher is not None:
        sampler.teacher = load_model(str(teacher), dtype="float32", device="cpu")[0]
        sampler.num_teacher_top = config.trainer.ppo.distillation.top_k
    before, task = accuracy(kit, sampler), Task(kit, config, sampler)
    connect: Any = lambda: task  # noqa: E731
    parts = Components(world=world, connect=connect, publisher=sampler, **load_ppo_engines(config))
    with contextlib.redirect_stdout(None):
        PPOTrainer(config, parts).train()
    sampler.load_newest()
    return Learned(before, accuracy(kit, sampler), task.metrics)
