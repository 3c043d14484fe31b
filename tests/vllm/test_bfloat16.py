"""Log-probabilities of a real vLLM in bfloat16, beside the noise of this dtype, on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.api.engine import Sequence
from arealite.ext.self_check.plain_copy import PlainModel
from tests.impl.engine.conftest import group as group  # a fixture
from tests.impl.engine.helpers import make_engine
from tests.smollm2 import smollm2
from tests.vllm.inside_server import Generation, InsideServer
from tests.vllm.real import real_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
PROMPTS = 16
PROMPT_TOKENS = 16
TOKENS = 128
REPLY_S = 1000.0
MEAN_MARGIN = 1.5
"""Largest mean difference, in multiples of the noise: that of transformers in bfloat16 from
float32. Two independent roundings differ by 1.4 times the noise of one."""
MAX_MARGIN = 2.0
Logprobs = list[np.ndarray]


def sampled(folder: Path, log_folder: Path) -> list[tuple[list[int], Generation]]:
    """Return prompts and generations of a vLLM server in bfloat16, which run concurrently."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 40_000, (PROMPTS, PROMPT_TOKENS)).tolist()
    with (
        real_vllm(folder, log_folder, "--dtype=bfloat16") as real,
        ThreadPoolExecutor(PROMPTS) as threads,
    ):
        server = InsideServer(
            real=real,
            token="",
            folders=[folder],
            hold_folder=log_folder,
            reply_s=REPLY_S,
        )
        generate: Callable[[list[int]], Generation] = lambda prompt: server.generate(  # noqa: E731
            prompt, max_tokens=TOKENS
        )
        return [*zip(prompts, threads.map(generate, prompts), strict=True)]


def as_row(prompt: list[int], generation: Generation) -> Sequence:
    tokens = np.array(prompt + generation.tokens, np.int32)
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    return Sequence(tokens=tokens, loss_mask=loss_mask, temperature=1.0)


@torch.no_grad()
def in_transformers(folder: Path, rows: list[Sequence], *, attention: str) -> Logprobs:
    """Return the log-probabilities of transformers in bfloat16; all rows are one batch."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    ).eval()
    ids = torch.from_numpy(np.stack([row.tokens for row in rows])).long()
    logits = model(ids[:, :-1]).logits
    logprobs = logits[:, -TOKENS:].float().log_softmax(-1)
    return [*logprobs.gather(-1, ids[:, -TOKENS:, None])[..., 0].numpy()]


def differences(first: Logprobs, second: Logprobs) -> np.ndarray:
    return abs(np.concatenate(first) - np.concatenate(second))


def test_vllm_differs_from_the_trainer_by_no_more_than_the_noise(
    tmp_path: Path, group: None
) -> None:
    folder = smollm2()
    generations = sampled(folder, tmp_path)
    rows = [as_row(prompt, generation) for prompt, generation in generations]
    vllm = [np.array(generation.logprobs, np.float32) for _, generation in generations]
    trained = make_engine(folder, dtype="bfloat16").forward(rows)["logprobs"]
    trainer = [logprobs[row.loss_mask] for logprobs, row in zip(trained, rows, strict=True)]
    plain = PlainModel(folder)
    exact = [plain.exact(row) for row in rows]
    sdpa = in_transformers(folder, rows, attention="sdpa")
    eager = in_transformers(folder, rows, attention="eager")
    noise = differences(sdpa, exact)
    difference = differences(vllm, trainer)
    pairs = {
        "vLLM - trainer": difference,
        "transformers - float32": noise,
        "vLLM - float32": differences(vllm, exact),
        "trainer - float32": differences(trainer, exact),
        "transformers: batch with sdpa - batch with eager attention": differences(sdpa, eager),
    }
    for names, values in pairs.items():
        print(f"{names}: mean {values.mean():.5f}, largest {values.max():.4f}")
    assert len(difference) == PROMPTS * TOKENS
    assert difference.mean() <= MEAN_MARGIN * noise.mean()
    assert difference.max() <= MAX_MARGIN * noise.max()
