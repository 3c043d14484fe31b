"""A lesson's model is warmed up on demonstrations and reused."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from arealite.ext.demo.tiny_model import TinyModel, make_tokenizer
from tools.lesson import Lesson, encode, make_kit, pad

SHAPE = TinyModel(hidden=32, layers=1, alphabet="ab=", context=16)


def echo(rng: random.Random) -> tuple[str, str]:
    letter = rng.choice("ab")
    return f"{letter}=", letter


def lesson(**changes: object) -> Lesson:
    about = {"about": "echo", "shape": SHAPE, "examples": echo, "overrides": (), "batch_size": 16}
    return Lesson(**about | changes)  # pyright: ignore


def test_warm_up_stops_at_the_likelihood_and_the_kit_is_reused(tmp_path: Path) -> None:
    model = make_kit(tmp_path, lesson(warm_up=0.6), 1)
    steps, reached = (tmp_path / "done").read_text().split()
    assert 0 < int(steps) < 1500
    assert float(reached) >= 0.6
    written = (model / "model.safetensors").stat().st_mtime_ns
    assert make_kit(tmp_path, lesson(warm_up=0.9), 1) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == written


def test_warm_up_stops_after_max_steps(tmp_path: Path) -> None:
    make_kit(tmp_path, lesson(warm_up=1.1, max_steps=3), 1)
    assert (tmp_path / "done").read_text().startswith("2 ")


def test_chat_template_of_the_lesson_is_saved_with_the_model(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    make_kit(tmp_path, lesson(warm_up=0.0, chat_template=template), 1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert encode(tokenizer, [{"role": "user", "content": "a"}], "b") == ([2, 4], [3, 1])


def test_batch_marks_answer_tokens_and_pads_rows() -> None:
    tokenizer = make_tokenizer("ab=", context=16)
    ids_BT, marks_BT = pad([encode(tokenizer, "a=", "b"), encode(tokenizer, "=", "")])
    assert ids_BT.tolist() == [[2, 4, 3, 1], [4, 1, 0, 0]]
    assert torch.equal(marks_BT, torch.tensor([[0.0, 0, 1, 1], [0, 1, 0, 0]]))
