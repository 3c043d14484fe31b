"""The bytes of each token id, which stay exact where a character takes several tokens.

The tokenizers package alone reads the model's tokenizer.json: transformers would load torch and
take seconds. Decoding ids one by one would lose their bytes.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)
}
"""The byte of each character of byte-level BPE (GPT-2's encoder): a printable byte is itself, the
others are the characters from 256 on."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece's byte fallback."""


class Vocabulary:
    """The tokens of one tokenizer.json."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._decoder = repr(self._tokenizer.decoder)

    @classmethod
    def find(cls, folders: Iterable[Path]) -> "Vocabulary | None":
        """Open the first folder's tokenizer that can be read; None if there is none."""
        for file in (folder.expanduser() / "tokenizer.json" for folder in folders):
            with suppress(Exception):  # the package raises nothing narrower
                return cls(file)
        return None

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; the joined pieces of a text are the text."""
        if token in self._added:
            return self._added[token].content.encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # models have more ids than tokenizers
            return f"⟨{token}⟩".encode()
        if "ByteLevel" in self._decoder:
            return b"".join(bytes([ALPHABET[c]]) if c in ALPHABET else c.encode() for c in text)
        if "ByteFallback" in self._decoder and (byte := BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()

    def table(self, tokens: Iterable[int]) -> dict[str, object]:
        """Return the pieces of tokens for a report, as latin-1: each character is a byte."""
        ids = sorted(tokens)
        return {
            "ids": ids,
            "pieces": [self.piece(token).decode("latin-1") for token in ids],
            "special": [t for t in ids if t in self._added and self._added[t].special],
        }


def id_table(tokens: Iterable[int]) -> dict[str, object]:
    """Return the table of a run without a tokenizer: each token is shown as its id."""
    ids = sorted(tokens)
    return {"ids": ids, "pieces": [f"{token} " for token in ids], "special": []}
