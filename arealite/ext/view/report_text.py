"""The bytes of each token id, which stay exact where a character takes several tokens.

The tokenizers package alone reads the model's tokenizer.json: transformers would load torch and
take seconds. Decoding ids one by one would lose their bytes.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

_PRINTABLE = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(code): byte for code, byte in enumerate(_OTHERS, start=256)},
}
"""The byte of each character of byte-level BPE (GPT-2's encoder): a printable byte is itself, the
others are the characters from 256 on."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece's byte fallback."""


class Vocabulary:
    """The tokens of a tokenizer; without one, each token is shown as its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self._decoder = repr(tokenizer.decoder) if tokenizer else ""

    @classmethod
    def find(cls, folders: Iterable[Path]) -> "Vocabulary":
        """Open the first folder's tokenizer that can be read; use no tokenizer if there is none."""
        for folder in folders:
            file = folder.expanduser() / "tokenizer.json"
            with suppress(Exception):  # the package raises nothing narrower
                return cls(Tokenizer.from_file(str(file)))
        return cls(None)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; the joined pieces of a text are the text."""
        if self._tokenizer is None:
            return f"{token} ".encode()
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # models have more ids than tokenizers
            return f"⟨{token}⟩".encode()
        if "ByteLevel" in self._decoder:
            return b"".join(map(_bytes_of, piece))
        if "ByteFallback" in self._decoder:
            byte = BYTE.fullmatch(piece)
            if byte:
                return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

    def table(self, tokens: Iterable[int]) -> dict[str, object]:
        """Return the pieces of tokens for a report, as latin-1: each character is a byte."""
        ids = sorted(tokens)
        return {
            "ids": ids,
            "pieces": [self.piece(token).decode("latin-1") for token in ids],
            "special": [token for token in ids if self._is_special(token)],
        }

    def _is_special(self, token: int) -> bool:
        return token in self._added and self._added[token].special


def _bytes_of(character: str) -> bytes:
    """Return the byte of a character of ALPHABET; another character is its UTF-8."""
    if character in ALPHABET:
        return bytes([ALPHABET[character]])
    return character.encode()
