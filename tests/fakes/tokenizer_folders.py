"""Folders with small tokenizers of several kinds, and random texts and ids for them.

    folder = byte_level(tmp_path)
    texts = random_texts(random.Random(0), 100, ["<|eot|>"])

Each tokenizer has tokens with every option of AddedToken: special and ordinary ones, with stripped
sides, as whole words, and normalized.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.fakes.chat_families import TEXT

CORPUS = [*TEXT.splitlines(), "Привет мир, как дела? Ça va très bien, été à Noël. שלום عالم"]
CHATML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|eot|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ADDED = [
    AddedToken("<|start|>", special=True),
    AddedToken("<|eot|>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True, normalized=True),
    AddedToken("<call>", special=False, lstrip=True, rstrip=True, normalized=False),
    AddedToken("wörd", special=False, single_word=True, normalized=True),
    AddedToken("Loud", special=False, normalized=True),
    AddedToken("  ", special=False, normalized=False),
]
RANGES = [
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0x00, 0x1F),
    (0x7F, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0xDFF),
    (0xE00, 0xEFF),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2200, 0x27BF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFE00, 0xFFFD),
    (0x1F300, 0x1FAFF),
    (0xE0001, 0xE007F),
    (0x20000, 0x2A6DF),
]
"""First and last character of ranges of Unicode: scripts, controls, marks, symbols, emoji."""
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", ""]
PHRASES = ["Hello world", "don't", "I 'm", "a . b ?", "été", "e\u0301te\u0301", "１２３", "123 456"]


def random_texts(rng: random.Random, count: int, tokens: list[str]) -> list[str]:
    """Return texts of several scripts, with the texts of tokens among them; some are empty."""
    return [_random_text(rng, tokens) for _ in range(count)]


def _random_text(rng: random.Random, tokens: list[str]) -> str:
    parts = list[str]()
    for _ in range(rng.randrange(9)):
        kind = rng.random()
        if kind < 0.35:
            low, high = rng.choice(RANGES)
            parts += [chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8))]
        elif kind < 0.5:
            parts.append(rng.choice(tokens))
        elif kind < 0.6:
            token = rng.choice(tokens)
            parts.append(token[: rng.randint(0, len(token))].upper())
        elif kind < 0.8:
            words = rng.choice(CORPUS).split(" ")
            start = rng.randrange(len(words))
            parts.append(" ".join(words[start : start + rng.randint(1, 6)]))
        else:
            parts.append(rng.choice(PHRASES))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def random_ids(rng: random.Random, count: int, size: int) -> list[list[int]]:
    """Return sequences of ids below `size` and a few above it; added tokens are frequent."""
    return [
        [
            rng.randrange(size + 3)
            if rng.random() < 0.7
            else rng.randrange(max(0, size - 12), size)
            for _ in range(rng.randrange(12))
        ]
        for _ in range(count)
    ]


def write(
    folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], *, model_type: str = "llama"
) -> Path:
    """Write a folder with tokenizer.json, tokenizer_config.json and config.json; return it."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    return folder


def saved_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the value of `added_tokens_decoder` in tokenizer_config.json."""
    tokens = tokenizer.get_added_tokens_decoder()
    return {str(index): token.__getstate__() for index, token in tokens.items()}


def byte_level(folder: Path) -> Path:
    """Write a byte-level BPE like Llama 3's, with a BOS and several templates."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<bos>", "<pad>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    bos = ("<bos>", 0)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[bos]
            ),
        ]
    )
    tokenizer.add_special_tokens(["<new>", "<image>"])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|eot|>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": True},
        "additional_special_tokens": ["<|start|>", "<new>"],
        "image_token": "<image>",
        "added_tokens_decoder": saved_tokens(tokenizer),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": True,
        "chat_template": [
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": CHATML + "{{ tools|tojson }}"},
        ],
    }
    return write(folder, tokenizer, settings)


def sentencepiece(folder: Path) -> Path:
    """Write a BPE with byte fallback and a space before the text, like Mistral's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special: Any = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = trainers.BpeTrainer(vocab_size=700, special_tokens=special)
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are no added tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens(ADDED)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=2, pad_token="</s>", length=4)
    settings = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "legacy": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    write(folder, tokenizer, settings, model_type="mistral")
    (folder / "chat_template.jinja").write_text(CHATML, "utf-8")
    return folder


def word_piece(folder: Path) -> Path:
    """Write a WordPiece like BERT's, with type ids and texts that are cleaned up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special: Any = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer: Any = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "cls_token": "[CLS]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
        "extra_special_tokens": {"boi_token": "<|start|>"},
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "token_type_ids"],
    }
    return write(folder, tokenizer, settings, model_type="bert")


def qwen(folder: Path, *, is_official: bool = True) -> Path:
    """Write a folder that transformers reads with Qwen2Tokenizer, in the form of Qwen's files."""
    from transformers import Qwen2Tokenizer

    made = Qwen2Tokenizer(
        vocab=_byte_vocab(),
        merges=[("h", "e"), ("\u0120", "w"), ("l", "l")],
        eos_token="<|im_end|>",
    )
    tokenizer = made.backend_tokenizer
    tokenizer.add_tokens(ADDED)
    tokenizer.add_tokens(["unsaved"])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|start|>"],
        "added_tokens_decoder": saved_tokens(tokenizer),
        "errors": "replace",
        "split_special_tokens": False,
        "chat_template": CHATML,
    }
    if not is_official:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return write(folder, tokenizer, settings, model_type="qwen2")


def _byte_vocab() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: index for index, token in enumerate([*alphabet, "he", "\u0120w", "ll"])}


def gemma(folder: Path) -> Path:
    """Write a folder that transformers reads with GemmaTokenizer."""
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "he", "▁w"]
    vocab = {token: index for index, token in enumerate(pieces)}
    made = GemmaTokenizer(vocab=vocab, merges=[("h", "e"), ("▁", "w")])
    tokenizer = made.backend_tokenizer
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    settings = {"tokenizer_class": "GemmaTokenizer", "boi_token": "<|start|>", "pad_token": "<pad>"}
    return write(folder, tokenizer, settings, model_type="gemma3_text")


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_piece": word_piece,
    "qwen": qwen,
    "gemma": gemma,
}
