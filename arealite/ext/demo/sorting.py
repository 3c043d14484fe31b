"""The demo's task, sorting six digits, its data files, and a supervised warm-up of a tiny model.

Reinforcement learning needs a model that is sometimes right; this one is right in 30 % of cases.
"""

import dataclasses
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arealite.base.files import follow_umask
from arealite.ext.demo.tiny_model import TinyModel, make_tiny_model

NUM_DIGITS = 6
TRAIN_ROWS = 8192
EVAL_ROWS = 512
SHAPE = TinyModel(hidden=64, layers=2, heads=4, alphabet="123456789=", context=64)
LR = 2e-3


def question(digits: str) -> str:
    """Return the prompt for some digits: `531426=`."""
    return f"{digits}="


def answer(digits: str) -> str:
    """Return the digits in order: `123456`, a plain integer."""
    return "".join(sorted(digits))


def draw(rng: random.Random, count: int, *, without: Iterable[str] = ()) -> list[str]:
    """Draw `count` different strings of six digits 1-9, none of them in `without`."""
    taken = {*without}
    drawn = dict[str, None]()
    while len(drawn) < count:
        digits = "".join(rng.choices("123456789", k=NUM_DIGITS))
        if digits not in taken:
            drawn[digits] = None  # in the order of the draws
    return [*drawn]


def held_out(seed: int) -> list[str]:
    """Return the held-out digit strings of a seed; training and warm-up do not use them."""
    return draw(random.Random(f"held-out-{seed}"), EVAL_ROWS)


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write train.jsonl and eval.jsonl, disjoint, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    eval_rows = held_out(seed)
    train_rows = draw(random.Random(f"train-{seed}"), TRAIN_ROWS, without=eval_rows)
    train_path = folder / "train.jsonl"
    eval_path = folder / "eval.jsonl"
    _write_tasks(train_path, train_rows)
    _write_tasks(eval_path, eval_rows)
    return train_path, eval_path


def _write_tasks(path: Path, rows: list[str]) -> None:
    """Write a JSONL file with one task for each string of digits."""
    with path.open("w") as file:
        for digits in rows:
            task = {"prompt": question(digits), "ground_truth": answer(digits)}
            file.write(f"{json.dumps(task)}\n")


def warm_up(
    folder: Path, seed: int, *, accuracy: float = 0.3, max_steps: int = 1000, batch_size: int = 256
) -> float:
    """Train the model in `folder` until its answers are right with probability `accuracy`; save it.

    The probability of the exact answer at temperature 1 is measured, not sampled: the mean over
    fresh rows of the product of the answer's token probabilities, EOS included. Return the last
    measurement.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    rng = random.Random(f"warm-up-{seed}")
    held_out_rows = held_out(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    probability = 0.0
    for step in range(max_steps):
        rows = draw(rng, batch_size, without=held_out_rows)
        logprobs_BT = _answer_logprobs(model, tokenizer, rows)
        probability = logprobs_BT.sum(-1).exp().mean().item()
        if probability >= accuracy:
            break
        optimizer.zero_grad()
        loss = -logprobs_BT.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warmup_factor = min(1.0, (step + 1) / 10)
        decay_factor = 0.2 if probability > accuracy / 2 else 1.0
        for group in optimizer.param_groups:
            group["lr"] = LR * warmup_factor * decay_factor
        optimizer.step()
    model.save_pretrained(folder)
    follow_umask(folder.glob("*.safetensors"))
    return probability


def _answer_logprobs(model: Any, tokenizer: Any, rows: list[str]) -> Any:
    """Return log-probabilities [B, T] of the answers' tokens and EOS; rows have one length."""
    import torch

    sequences = list[list[int]]()
    for digits in rows:
        ids = tokenizer.encode(question(digits) + answer(digits))
        sequences.append([*ids, tokenizer.eos_token_id])
    ids_BT = torch.tensor(sequences)
    answers_BT = ids_BT[:, NUM_DIGITS + 1 :]
    logits_BTV = model(input_ids=ids_BT).logits[:, NUM_DIGITS:-1].float()
    logprobs_BTV = logits_BTV.log_softmax(-1)
    return logprobs_BTV.gather(-1, answers_BT[..., None])[..., 0]


def make_kit(folder: Path, seed: int, *, heads: int = SHAPE.heads) -> Path:
    """Write a trained model to `folder`/model and the data beside it; keep complete files.

    Args:
        folder: Where to write.
        seed: Seed of the weights and of the data.
        heads: Attention heads of the model; two for vLLM, which has no heads of 16 on a CPU.
    """
    if (folder / "done").exists():
        return folder
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # more of them wait for each other, on a model as small as this
    logging.disable_progress_bar()
    write_data(folder, seed)
    model_folder = folder / "model"
    make_tiny_model(model_folder, dataclasses.replace(SHAPE, seed=seed, heads=heads))
    probability = warm_up(model_folder, seed)
    (folder / "done").write_text(f"{probability:.3f}\n")
    return folder
