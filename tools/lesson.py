"""Define a lesson, and warm up its model: supervised learning of demonstrations.

Reinforcement learning needs a model that is sometimes right. A lesson defines the demonstrations
and the end of the warm-up.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.base.files import follow_umask
from arealite.ext.demo.tiny_model import TinyModel, make_tiny_model
from arealite.system.data import templates

Example = tuple[str | list[dict[str, Any]], str]
"""A prompt, as text or as chat messages for the model's template, and the demonstrated answer."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A task, its tiny model, and the options of the run."""

    about: str
    """Title of the curve."""
    shape: TinyModel
    examples: Callable[[random.Random], Example]
    """A function that draws one demonstration."""
    overrides: Sequence[str]
    """Options of train.py, such as the environment; `train` adds options of servers and names."""
    warm_up: float = 0.3
    """The warm-up ends when demonstrated answers have this mean probability."""
    max_steps: int = 1500
    """Maximum number of warm-up steps."""
    batch_size: int = 128
    lr: float = 2e-3
    chat_template: str | None = None
    """Chat template of the tokenizer. None: the contents one after the other, EOS after answers."""
    curves: Sequence[str] = ("reward/mean", "eval/reward")
    """Metrics that are drawn, and printed for the first and the last steps."""


def make_kit(folder: Path, lesson: Lesson, seed: int) -> Path:
    """Write the warmed-up model of a lesson to `folder`/model if it is missing; return its path."""
    from transformers import AutoTokenizer

    if (folder / "done").exists():
        return folder / "model"
    model = make_tiny_model(folder / "model", dataclasses.replace(lesson.shape, seed=seed))
    if lesson.chat_template is not None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = lesson.chat_template
        tokenizer.save_pretrained(model)
    steps, reached = warm_up(model, lesson, seed)
    (folder / "done").write_text(f"{steps} {reached:.3f}\n")
    print(f"warm-up: {steps} steps, probability of a demonstrated answer {reached:.3f}")
    return model


def warm_up(folder: Path, lesson: Lesson, seed: int) -> tuple[int, float]:
    """Train the model in `folder` on demonstrations; return (steps, the last mean probability)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    rng = random.Random(f"lesson-{seed}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.lr, weight_decay=0.0)
    step, reached = 0, 0.0
    for step in range(lesson.max_steps):
        rows = [encode(tokenizer, *lesson.examples(rng)) for _ in range(lesson.batch_size)]
        ids_BT, answer_BT = pad(rows)
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits.log_softmax(-1)
        picked_BT = logits_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0] * answer_BT[:, 1:]
        now = picked_BT.sum(-1).exp().mean().item()
        reached = now if step == 0 else 0.8 * reached + 0.2 * now
        if reached >= lesson.warm_up:
            break
        optimizer.zero_grad()
        (-picked_BT.sum() / answer_BT[:, 1:].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lesson.lr * min(1.0, (step + 1) / 20)
        optimizer.step()
    model.save_pretrained(folder)
    follow_umask(folder.glob("*.safetensors"))
    return step, reached


def encode(tokenizer: Any, prompt: Any, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, as agents send it, and of its answer with EOS."""
    context = templates.tokenize(tokenizer, prompt)
    sampled = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return context, [*sampled, tokenizer.eos_token_id]


def pad(rows: Iterable[tuple[list[int], list[int]]]) -> tuple[Any, Any]:
    """Pad rows at the end; return ids [B, T], and 1.0 for each token of an answer [B, T]."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    both = [(torch.tensor(a + b), torch.tensor([0.0] * len(a) + [1.0] * len(b))) for a, b in rows]
    ids, marks = zip(*both, strict=True)
    return pad_sequence(ids, batch_first=True), pad_sequence(marks, batch_first=True)
