"""The demo's rows are correct, disjoint and seeded; the warm-up stops at its limits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.ext.demo import sorting
from arealite.ext.demo.tiny_model import TinyModel, make_tiny_model
from arealite.ext.math.math_verify import equal_integers
from arealite.system.data.dataset import load_tasks


def test_rows_are_correct_disjoint_and_seeded(tmp_path):
    train_file, eval_file = sorting.write_data(tmp_path / "a", seed=1)
    train, held_out = load_tasks(str(train_file), "train"), load_tasks(str(eval_file), "eval")
    assert (len(train), len(held_out)) == (sorting.TRAIN_ROWS, sorting.EVAL_ROWS)
    prompts = {task.prompt for task in train}
    assert len(prompts) == len(train)
    assert not prompts & {task.prompt for task in held_out}
    for task in (*train, *held_out):
        digits = task.prompt.removesuffix("=")
        assert len(digits) == 6
        assert "0" not in digits
        assert task.ground_truth == "".join(sorted(digits))
    again, _ = sorting.write_data(tmp_path / "b", seed=1)
    other, _ = sorting.write_data(tmp_path / "c", seed=2)
    assert again.read_bytes() == train_file.read_bytes() != other.read_bytes()


def test_answers_are_compared_as_integers():
    assert equal_integers(sorting.answer("531426"), "123456") is True
    assert equal_integers("123465", sorting.answer("531426")) is False


@pytest.fixture
def model_folder(tmp_path):
    shape = TinyModel(hidden=32, layers=1, heads=2, alphabet=sorting.SHAPE.alphabet, context=64)
    return make_tiny_model(tmp_path / "model", shape)


def test_warm_up_stops_at_the_accuracy_and_saves_the_model(model_folder):
    before = AutoModelForCausalLM.from_pretrained(model_folder)
    measured = sorting.warm_up(model_folder, 1, accuracy=1e-4, batch_size=64)
    assert 1e-4 <= measured < 0.1
    after = AutoModelForCausalLM.from_pretrained(model_folder)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    logprobs_BT = sorting._answer_logprobs(after, tokenizer, ["531426", "999111"])
    assert logprobs_BT.shape == (2, 7)


def test_warm_up_stops_at_max_steps(model_folder):
    assert sorting.warm_up(model_folder, 1, max_steps=2, batch_size=8) < 0.3


def test_answer_logprobs_are_those_of_the_right_tokens(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = [*tokenizer("531426=123456")["input_ids"], tokenizer.eos_token_id]
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([[-100] * 7 + ids[7:]])).loss
    logprobs_BT = sorting._answer_logprobs(model, tokenizer, ["531426"])
    assert torch.allclose(-logprobs_BT.mean(), loss, atol=1e-5)


def test_existing_kit_is_reused(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(sorting, "warm_up", lambda folder, seed: made.append(seed) or 0.3)
    for _ in range(2):
        sorting.make_kit(tmp_path / "kit", 7)
    assert made == [7]
    assert (tmp_path / "kit" / "model" / "model.safetensors").exists()
    assert (tmp_path / "kit" / "done").read_text() == "0.300\n"
