"""The tokenizer of a model folder, as agents use it."""

from typing import Any, Protocol


class Tokenizer(Protocol):
    """The methods of transformers' tokenizers that agents call; others may be there, too."""

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """Tokenize a text or a list of texts; the ids are the value of `input_ids`."""
        ...

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of transformers' object, such as `chat_template`."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of one id or of a sequence of ids."""
        ...

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """Return the ids of a text."""
        ...


def load_with_transformers(path: str) -> Any:
    """Load the tokenizer of a folder with transformers."""
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(path)  # pyright: ignore
