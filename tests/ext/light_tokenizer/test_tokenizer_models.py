"""The light tokenizer has the results of transformers' object on tokenizers of published models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from arealite.ext.light_tokenizer.tokenizer_folder import is_compared
from tests.ext.light_tokenizer.test_tokenizer import assert_equal_tokens, load_both
from tests.gemma import FOLDER, gemma
from tests.smollm2 import smollm2
from tools import gemma as tool

pytestmark = pytest.mark.skipif(
    not is_compared(transformers.__version__), reason="transformers reads all folders"
)
CHAT = [{"role": "user", "content": "  What is é? "}, {"role": "assistant", "content": "A"}]


def test_tests_use_the_folder_of_the_tool() -> None:
    assert FOLDER == tool.FOLDER


@pytest.mark.parametrize("make", [smollm2, gemma])
def test_texts_have_the_tokens_of_transformers(make: Callable[[], Path]) -> None:
    light, full = load_both(make())
    assert_equal_tokens(light, full, 5_000)


def test_rendering_of_smollm2_is_that_of_transformers() -> None:
    light, full = load_both(smollm2())
    for options in ({"add_generation_prompt": True}, {"tokenize": False}, {"return_dict": False}):
        assert light.apply_chat_template(CHAT, **options) == full.apply_chat_template(
            CHAT, **options
        )
    assert light.full_object is None
