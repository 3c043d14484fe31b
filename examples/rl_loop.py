"""The whole loop of reinforcement learning in one file and one process.

    python3 examples/rl_loop.py

A tiny model learns to sort six digits: 30 % of its answers are right at the start, more than 70 %
at the end, in under a minute on two CPU cores. The distributed system uses the same parts, and
puts processes, queues and files between them.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tools/, and for arealite where it is not installed

from arealite.algo.advantages import dr_grpo, group_advantages  # noqa: E402
from arealite.algo.losses import make_policy_loss  # noqa: E402
from arealite.algo.reduction import token_weights  # noqa: E402
from arealite.api.algorithm import AdvantageConfig, LossConfig  # noqa: E402
from arealite.api.engine import Sequence, Training  # noqa: E402
from arealite.api.engine_config import FSDPConfig, OptimizerConfig  # noqa: E402
from arealite.api.episode import EpisodeRecord  # noqa: E402
from arealite.api.llm import LLMResponse, SamplingConfig  # noqa: E402
from arealite.api.trajectory import Segment  # noqa: E402
from arealite.ext.demo.sorting import answer, draw, held_out, make_kit, question  # noqa: E402
from arealite.ext.embedded.decoder import Decoder  # noqa: E402
from arealite.ext.embedded.generation import Generation, SamplingParams  # noqa: E402
from arealite.ext.embedded.weight_loading import load_model  # noqa: E402
from arealite.impl.engine.fsdp import FSDPEngine  # noqa: E402
from arealite.impl.rollout.tree_maker import make_tree  # noqa: E402

SEED = 1
STEPS, GROUPS, GROUP_SIZE, UPDATES = 80, 64, 8, 2
"""Number of batches; tasks per batch; answers per task; optimizer steps per batch."""
MAX_NEW_TOKENS = 8


@dataclass
class Sample:
    """One answer to one task."""

    digits: str
    segment: Segment
    """Tokens of prompt and answer, with the logprob and the version of each sampled token."""
    reward: float


class Sampler:
    """Generates with a separate copy of the model, like a server; its weights have a version."""

    def __init__(self, model_path: str, max_rows: int = GROUPS * GROUP_SIZE) -> None:
        self.model, self.tokenizer = load_model(model_path, dtype="float32", device="cpu")
        self.decoder = Decoder(self.model, max_rows=max_rows, seed=SEED)
        self.version = 0

    def request(self, digits: str) -> Generation:
        """Return a request for one answer, before its first token is sampled."""
        sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
        prompt = self.tokenizer.encode(question(digits))
        stops = frozenset([self.tokenizer.eos_token_id])
        return Generation(
            rid=digits, prompt=prompt, sampling=sampling, limit=MAX_NEW_TOKENS, stops=stops
        )

    def sample(self, tasks: list[str]) -> list[Sample]:
        """Answer each task: one forward pass over the prompts, then one pass per further token."""
        requests = [self.request(digits) for digits in tasks]
        waiting = deque(requests)
        with torch.inference_mode():
            while waiting or self.decoder.running:
                if waiting:
                    self.decoder.prefill(waiting)
                else:
                    self.decoder.decode()
                for ended in self.decoder.remove_ended():
                    ended.close_span(str(self.version))
        return [self.score(request) for request in requests]

    def score(self, request: Generation) -> Sample:
        """Compare an answer with the right one; return the reward and the exact sampled tokens."""
        versions = [int(v) for v, start, end in request.spans for _ in range(start, end)]
        response = LLMResponse(
            output_ids=request.output,
            logprobs=request.logprobs,
            versions=versions,
            stop_reason="stop",
        )
        record = EpisodeRecord()
        record.add(record.begin(request.prompt, SamplingConfig()), response)
        text = self.tokenizer.decode(request.output, skip_special_tokens=True)
        reward = 1.0 if text == answer(request.rid) else 0.0
        (segment,) = make_tree(record.turns).segments()
        return Sample(request.rid, segment, reward)

    def next_batch(self, rng: random.Random) -> list[Sample]:
        """Answer the tasks of the next batch, each GROUP_SIZE times."""
        return self.sample(draw_tasks(rng))

    def load(self, engine: FSDPEngine, version: int) -> None:
        """Copy the trained weights into the sampler; drop keys and values of the old weights."""
        weights = self.model.state_dict()
        for name, tensor in engine.stream_weights():
            weights[name].copy_(tensor)
        self.decoder.clear()
        self.version = version


def make_engine(model_path: str) -> FSDPEngine:
    """Return the model to train, with its optimizer, on the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = OptimizerConfig(schedule="linear")
    training = Training(optimizer=optimizer, lr=4e-4, total_updates=STEPS * UPDATES)
    return FSDPEngine(FSDPConfig(), model_path=model_path, seed=SEED, training=training)


def make_rows(samples: list[Sample]) -> list[Sequence]:
    """Turn samples into training rows: an advantage, a weight and a logprob for each token."""
    groups = [sample.digits for sample in samples]
    rewards = [sample.reward for sample in samples]
    advantages = group_advantages(rewards, groups, dr_grpo, AdvantageConfig())
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        segment = sample.segment
        tokens_T = np.frombuffer(segment.tokens, np.int32)
        fields = {
            "advantages": np.full(len(tokens_T), advantage, np.float32),
            "behav_logprobs": np.frombuffer(segment.logprobs, np.float32),
        }
        mask_T = np.frombuffer(segment.loss_mask, np.bool_)
        row = Sequence(
            tokens=tokens_T, loss_mask=mask_T, temperature=segment.temperature, fields=fields
        )
        rows.append(row)
    return rows


def train(engine: FSDPEngine, samples: list[Sample]) -> dict[str, float]:
    """Apply the optimizer steps of one batch; return the statistics of the last step."""
    loss = make_policy_loss(LossConfig(eps_high=0.28))
    rows = make_rows(samples)
    # The loss clips the ratio to the probabilities before the first update.
    logprobs = engine.forward(rows)["logprobs"]
    stats: dict[str, float] = {}
    for part in range(UPDATES):
        minibatch = rows[part::UPDATES]
        weights = token_weights("token_mean", [int(row.loss_mask.sum()) for row in minibatch])
        for row, weight, prox_T in zip(minibatch, weights, logprobs[part::UPDATES], strict=True):
            row.fields["loss_weight"] = np.full(len(row.tokens), weight, np.float32)
            row.fields["prox_logprobs"] = prox_T
        # The engine packs rows into micro-batches, adds their gradients, and steps the optimizer.
        stats = engine.train_batch(minibatch, loss)
    return stats


def describe(samples: list[Sample], step: int) -> str:
    """Return mean reward, age of the oldest token, and number of answers with two versions."""
    versions = [np.frombuffer(sample.segment.versions, np.int32) for sample in samples]
    sampled = [set(each[each >= 0].tolist()) for each in versions]
    reward = sum(sample.reward for sample in samples) / len(samples)
    interrupted = sum(len(each) > 1 for each in sampled)
    age = step - min(map(min, sampled))
    return f"reward {reward:.3f}  staleness {age}  interrupted {interrupted:3d}"


def accuracy(sampler: Sampler) -> float:
    """Return the share of right answers to held-out tasks at temperature 1."""
    samples = sampler.sample(held_out(SEED))
    return sum(sample.reward for sample in samples) / len(samples)


def draw_tasks(rng: random.Random) -> list[str]:
    """Draw the tasks of one batch; each task occurs GROUP_SIZE times."""
    return [d for d in draw(rng, GROUPS, without=held_out(SEED)) for _ in range(GROUP_SIZE)]


def main(make_sampler: type[Sampler] = Sampler) -> float:
    """Train; return the share of right answers after training."""
    about = sys.modules["__main__"].__doc__
    ArgumentParser(description=about, formatter_class=RawTextHelpFormatter).parse_args()
    torch.set_num_threads(1)  # this model is too small: more threads are slower
    model_path = str(make_kit(Path("runs/examples/kits/sorting"), SEED) / "model")
    sampler, engine, rng = make_sampler(model_path), make_engine(model_path), random.Random(SEED)
    print(f"right answers before training: {accuracy(sampler):.3f}")
    begin = time.perf_counter()
    for step in range(STEPS):
        samples = sampler.next_batch(rng)
        stats = train(engine, samples)
        sampler.load(engine, version=step + 1)
        seconds = time.perf_counter() - begin
        line = f"{describe(samples, step)}  entropy {stats['entropy']:.2f}  {seconds:3.0f} s"
        print(f"step {step:2d}  {line}", flush=True)
    right = accuracy(sampler)
    print(f"right answers after training: {right:.3f}")
    dist.destroy_process_group()
    return right


if __name__ == "__main__":
    main()
