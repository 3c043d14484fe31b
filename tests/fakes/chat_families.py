"""Chat templates in the shape of ten model families, and small tokenizers that have them.

    tokenizer = tokenizer_of("qwen3")
    FAMILIES["qwen3"].ends  # ("<|im_end|>", "<|endoftext|>")

The tokenizers are byte-level BPEs with some merges: a text has one canonical and many other token
sequences. The templates are shortened; what they do to earlier turns is what the real ones do:

* qwen3, glm4_5: thoughts before the last user message are dropped.
* gpt_oss: thoughts before a later final answer are dropped; a message has one call.
* llama3_1: a message has one call; its text is dropped if it has a call.
* mistral: the tools move to the last user message; ids of calls have nine letters and digits.
* deepseek_v3, qwen2_5, qwen3_coder, kimi_k2, granite: thoughts are not rendered at all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
TEXT = """\
You are a helpful assistant. The quick brown fox jumps over the lazy dog, and the weather in Paris
is sunny. {"name": "search", "arguments": {"query": "weather", "limit": 10}} {"parameters": {}}
<function=search> <parameter=query> </parameter> </function> <arg_key> <arg_value> 0123456789
I will think about the answer first. Then I call the tool with its arguments. Größe, 東京, 🙂
"""


@dataclass(frozen=True)
class ChatFamily:
    """A chat template and the tokens that it needs."""

    template: str
    ends: tuple[str, ...]
    """Special tokens that end a turn; the first one is the tokenizer's EOS."""
    special: tuple[str, ...]
    """Further special tokens."""
    words: tuple[str, ...] = ()
    """Tokens of their own that are not special."""


def family(name: str, ends: str, special: str = "", words: str = "") -> ChatFamily:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return ChatFamily(template, *(tuple(each.split()) for each in (ends, special, words)))


CHATML = ("<|im_end|> <|endoftext|>", "<|im_start|>")
TOOLS = "<tool_call> </tool_call> <tool_response> </tool_response>"
HARMONY = "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|endoftext|>"
DEEPSEEK = "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
DEEPSEEK += (
    "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
)
DEEPSEEK += "<｜tool▁output▁end｜> <｜User｜> <｜Assistant｜>"
KIMI = "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_call_begin|> "
KIMI += "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_argument_begin|> "
KIMI += "<|tool_call_end|>"
FAMILIES: dict[str, ChatFamily] = {
    "qwen2_5": family("qwen2_5", *CHATML, "<tool_call> </tool_call>"),
    "qwen3": family("qwen3", *CHATML, f"{TOOLS} <think> </think>"),
    "qwen3_coder": family("qwen3_coder", *CHATML, TOOLS),
    "llama3_1": family(
        "llama3_1",
        "<|eot_id|> <|eom_id|> <|end_of_text|>",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
    ),
    "mistral": family(
        "mistral",
        "</s>",
        "<s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS] [ARGS] [CALL_ID]",
    ),
    "glm4_5": family(
        "glm4_5",
        "<|endoftext|> <|user|> <|observation|>",
        "[gMASK] <sop> <|system|> <|assistant|>",
        f"{TOOLS} <think> </think> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "deepseek_v3": family(
        "deepseek_v3", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", DEEPSEEK
    ),
    "kimi_k2": family("kimi_k2", "<|im_end|> [EOS]", KIMI),
    "gpt_oss": family("gpt_oss", "<|return|> <|call|>", HARMONY),
    "granite": family(
        "granite", "<|end_of_text|>", "<|start_of_role|> <|end_of_role|> <|tool_call|>"
    ),
}
SHAPES: dict[str, ChatFamily] = {
    "qwq": family("qwq", *CHATML, f"{TOOLS} <think> </think>"),
    "deepseek_r1": family(
        "deepseek_r1",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        f"{DEEPSEEK} <think> </think>",
    ),
    "glm4_7": family(
        "glm4_7",
        "<|endoftext|> <|user|> <|observation|>",
        "[gMASK] <sop> <|system|> <|assistant|>",
        f"{TOOLS} <think> </think> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "gemma": family("gemma", "<eos> <end_of_turn>", "<bos> <start_of_turn>"),
}
"""Templates of other shapes, for rows of offline trainers: a generation prompt that opens a thought
(qwq, deepseek_r1, glm4_7), and a turn that does not end with the tokenizer's EOS (gemma)."""
BOS = {
    "llama3_1": "<|begin_of_text|>",
    "mistral": "<s>",
    "deepseek_v3": "<｜begin▁of▁sentence｜>",
    "deepseek_r1": "<｜begin▁of▁sentence｜>",
    "gemma": "<bos>",
}


def byte_level() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


@lru_cache(maxsize=16)
def tokenizer_of(name: str) -> Any:
    """Return a tokenizer of about 500 tokens with the template and special tokens of a family.

    It is shared by all callers: copy it (copy.deepcopy) before you change it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    chat = (FAMILIES | SHAPES)[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(byte_level().alphabet()),
        special_tokens=["<pad>", *chat.ends, *chat.special],
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in chat.words])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=chat.ends[0],
        bos_token=BOS.get(name),
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
    made.chat_template = chat.template
    return made


def end_ids(name: str) -> list[int]:
    """Return the ids of the tokens that end a turn."""
    return tokenizer_of(name).convert_tokens_to_ids(list(FAMILIES[name].ends))


@lru_cache(maxsize=16)
def vocabulary_of(name: str) -> tuple[dict[str, int], dict[int, str], frozenset[int]]:
    """Return the tokens of a family's tokenizer, their inverse, and the ids of added tokens."""
    tokenizer = tokenizer_of(name)
    vocabulary = tokenizer.get_vocab()
    written_as = {token: piece for piece, token in vocabulary.items()}
    return vocabulary, written_as, frozenset(tokenizer.added_tokens_decoder)


def scattered(name: str, text: str, rng: random.Random) -> list[int]:
    """Return a random, usually non-canonical, token sequence of a text.

    Tokens are split between any two bytes, also within a character. Some special tokens and words
    are spelled out.
    """
    vocabulary, written_as, added = vocabulary_of(name)
    ids: list[int] = []
    for token in tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]:
        written = written_as[token]
        if (token in added and rng.random() < 0.9) or rng.random() < 0.5:
            ids.append(token)
            continue
        if token in added:
            made = byte_level().pre_tokenize_str(written)
            written = "".join(piece for piece, _ in made)
        cut = rng.randrange(len(written) + 1)
        for piece in (written[:cut], written[cut:]):
            ids += [vocabulary[piece]] if piece in vocabulary else [vocabulary[c] for c in piece]
    return ids
