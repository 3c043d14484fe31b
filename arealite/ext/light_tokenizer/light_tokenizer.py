"""Loads the tokenizer of a model folder without importing torch and transformers.

Importing transformers takes seconds of CPU time in each process. `LightTokenizer` gives the results
of transformers' object for the calls that agents make. Any other use loads transformers' object.
"""

import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Encoding
from tokenizers.models import BPE

from arealite.api.tokenizer import load_with_transformers
from arealite.ext.light_tokenizer.tokenizer_folder import (
    DATA,
    TokenizerParts,
    UnsupportedError,
    read_tokenizer,
)

_lock = threading.Lock()
CLEAN_UPS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts whose outer spaces `decode` removes if the folder demands it."""


def read(path: str) -> "LightTokenizer | None":
    """Read the tokenizer of a folder; return None if only transformers can read it."""
    try:
        return LightTokenizer(path, read_tokenizer(Path(path)))
    except UnsupportedError:
        return None


def _or_transformers(*errors: type[Exception]) -> Callable[..., Any]:
    """Call transformers' object if it is loaded, or if the method raises one of `errors`.

    A TypeError means that the method lacks an option or handles another type.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: "LightTokenizer", *args: Any, **options: Any) -> Any:
            if self.full_object is None:
                with suppress(UnsupportedError, *errors):
                    return method(self, *args, **options)
            return getattr(self.load_full_object(), method.__name__)(*args, **options)

        return call

    return decorate


class LightTokenizer:
    """The tokenizer of a folder.

    An attribute or an option that this class lacks, and any assignment to an attribute, load
    transformers' object. From then on it handles all calls.
    """

    full_object: Any = None
    """transformers' object; None: it is not needed yet."""

    def __init__(self, path: str, parts: TokenizerParts) -> None:
        """Create the tokenizer of the folder `path` from its parts."""
        named = parts.special_tokens
        texts = list(dict.fromkeys([*named.values(), *parts.extra_special_tokens]))
        ids = {text: parts.backend.token_to_id(text) for text in texts}
        values: dict[str, Any] = {
            "all_special_ids": [*ids.values()],
            "all_special_tokens": texts,
            "chat_template": parts.chat_template,
            "extra_special_tokens": parts.extra_special_tokens,
            "is_fast": True,
            "name_or_path": path,
            "special_tokens_map": named,
        }
        for name in [*DATA["special_tokens"], *named]:
            values[name] = named.get(name)
            values[f"{name}_id"] = ids.get(named.get(name, ""))
        self.__dict__.update(
            backend_tokenizer=parts.backend,
            _path=path,
            _parts=parts,
            _values=values,
        )

    def __getattr__(self, name: str) -> Any:
        """Return a value of the folder, or an attribute of transformers' object."""
        if name.startswith("__"):  # protocols of Python, such as those of copy and pickle
            raise AttributeError(name)
        if self.full_object is None and name in self._values:
            return self._values[name]
        return getattr(self.load_full_object(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.load_full_object(), name, value)

    def __repr__(self) -> str:
        return f"LightTokenizer({self._path!r})"

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added tokens included."""
        return self.backend_tokenizer.get_vocab()

    @_or_transformers(TypeError)
    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> "TokenizedText":
        """Tokenize a text or a list of texts."""
        texts = [text] if isinstance(text, str) else text
        if not texts or type(texts) is not list:
            raise UnsupportedError("__call__")
        encodings = self.backend_tokenizer.encode_batch(
            texts,
            add_special_tokens=add_special_tokens,
        )
        columns = {
            "input_ids": [encoding.ids for encoding in encodings],
            "token_type_ids": [encoding.type_ids for encoding in encodings],
            "attention_mask": [encoding.attention_mask for encoding in encodings],
        }
        names = {"input_ids", *self._parts.model_input_names}
        rows = {name: column for name, column in columns.items() if name in names}
        is_single = texts is not text
        if is_single:
            rows = {name: column[0] for name, column in rows.items()}
        return TokenizedText(rows, encodings)

    @_or_transformers(TypeError)
    def encode(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """Return the ids of a text."""
        tokenized = self(text, add_special_tokens=add_special_tokens)
        return tokenized["input_ids"]

    @_or_transformers(TypeError, OverflowError)
    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of one id or of a sequence of ids."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else ids
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        is_cleaned = clean_up_tokenization_spaces
        if is_cleaned is None:
            is_cleaned = self._parts.cleans_up
        if is_cleaned and not isinstance(self.backend_tokenizer.model, BPE):
            for spaced in CLEAN_UPS:
                text = text.replace(spaced, spaced.strip())
        return text

    @_or_transformers(TypeError)
    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of one token, or the ids of several; the id of unk_token if unknown."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        if token_id is None:
            return self._values["unk_token_id"]
        return token_id

    @_or_transformers(TypeError)
    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str:
        """Return the template for messages, with `tools` if they are not None."""
        templates: Any = self._parts.chat_template
        if isinstance(templates, dict):
            has_tool_template = tools is not None and "tool_use" in templates
            default = "tool_use" if has_tool_template else "default"
            chat_template = cast(Any, templates).get(chat_template or default, chat_template)
        elif chat_template is None:
            chat_template = templates
        if not isinstance(chat_template, str):
            raise UnsupportedError("get_chat_template")
        return chat_template

    @_or_transformers()  # a template can raise a TypeError
    def apply_chat_template(
        self, conversation: Any, tools: Any = None, *others: Any, **options: Any
    ) -> Any:
        """Render messages, and tokenize the rendering unless `tokenize` is false."""
        from arealite.ext.light_tokenizer.chat_template import render_chat  # loads jinja2

        has_other_options = not options.keys().isdisjoint(DATA["chat_options"])
        if others or has_other_options:
            raise UnsupportedError("apply_chat_template")
        template = self.get_chat_template(options.pop("chat_template", None), tools)
        is_tokenized = options.pop("tokenize", True)
        is_dict = options.pop("return_dict", True)
        defaults = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": False,
        }
        variables = defaults | self._parts.special_tokens | options
        text = render_chat(template, conversation, variables)
        if not is_tokenized:
            return text
        tokenized = self(text, add_special_tokens=False)
        return tokenized if is_dict else tokenized["input_ids"]

    def load_full_object(self) -> Any:
        """Load transformers' object, once. It shares the backend, so that its tokens are equal."""
        with _lock:
            if self.full_object is None:
                full = load_with_transformers(self._path)
                full._tokenizer = self.backend_tokenizer
                self.__dict__["full_object"] = full
        return self.full_object


class TokenizedText(UserDict[str, Any]):
    """The result of a call of a tokenizer; it behaves as transformers' BatchEncoding."""

    def __init__(self, rows: Mapping[str, Any], encodings: list[Encoding]) -> None:
        """Store the values by name, such as input_ids."""
        super().__init__(rows)
        self._encodings = encodings

    def __getitem__(self, key: Any) -> Any:
        """Return the values of a name, or what transformers' object has at an index."""
        if isinstance(key, str):
            return self.data[key]
        return self._load()[key]

    def __getattr__(self, name: str) -> Any:
        """Return the values of a name, or an attribute of transformers' object."""
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        if name in self.data:
            return self.data[name]
        return getattr(self._load(), name)

    def _load(self) -> Any:
        from transformers import BatchEncoding  # slow to import

        full = BatchEncoding(self.data, self._encodings)
        full.data = self.data  # tensors replace the values of both
        return full
