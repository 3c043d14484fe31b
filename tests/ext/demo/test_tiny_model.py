"""Tiny models load as Hugging Face folders, and their tokenizer decodes what it
encoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.ext.demo.tiny_model import PRINTABLE, TinyModel, make_tiny_model, make_tokenizer

SMALL = TinyModel(hidden=16, layers=1, heads=2, context=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", SMALL)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_model_has_the_requested_shape(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("qwen2", 16, 1)
    assert config.vocab_size == len(tokenizer) == len(PRINTABLE) + 2
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)
    assert model.generation_config.eos_token_id == 1
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_equal_seeds_give_equal_weights(folder, tmp_path):
    state = torch.random.get_rng_state()
    weights = folder / "model.safetensors"
    again = make_tiny_model(f"{tmp_path}/again", SMALL) / "model.safetensors"
    other = make_tiny_model(tmp_path / "other", TinyModel(**{**SMALL.__dict__, "seed": 2}))
    assert weights.read_bytes() == again.read_bytes()
    assert weights.read_bytes() != (other / "model.safetensors").read_bytes()
    assert torch.equal(state, torch.random.get_rng_state())


@given(st.text(alphabet=PRINTABLE))
def test_tokenizer_has_one_token_per_character(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_other_characters_are_dropped(tokenizer):
    assert tokenizer("1é2")["input_ids"] == tokenizer("12")["input_ids"]


def test_special_tokens_are_skipped_in_decoding(tokenizer):
    ids = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"


def test_longer_chat_extends_the_shorter_one(tokenizer):
    def ids(*messages):
        chat = [{"role": role, "content": content} for role, content in messages]
        made = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        return list(made)

    question = ids(("user", "1+1="))
    whole = ids(("user", "1+1="), ("assistant", "2"), ("user", "2+2="))
    assert question == list(tokenizer("1+1=")["input_ids"])
    assert whole[: len(question)] == question
    assert whole[len(question) : len(question) + 2] == [*tokenizer("2")["input_ids"], 1]


def test_shape_can_have_unused_ids_and_fewer_kv_heads(tmp_path):
    shape = TinyModel(hidden=8, layers=1, heads=2, kv_heads=1, vocab_size=64, alphabet="01")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", shape))
    assert model.config.vocab_size == 64
    assert model.config.num_key_value_heads == 1


def test_too_small_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="below the tokenizer's 4 tokens"):
        make_tiny_model(tmp_path, TinyModel(alphabet="01", vocab_size=3))


def test_alphabet_is_deduplicated():
    assert len(make_tokenizer("0011")) == 4


def test_each_given_word_is_one_token():
    tokenizer = make_tokenizer("ab(", words=("calc(", "b a"))
    assert tokenizer.encode("acalc(bb a") == [2, 5, 3, 6]
    assert tokenizer.decode([2, 5, 3, 6]) == "acalc(bb a"
