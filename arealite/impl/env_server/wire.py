"""What both ends of an environment's wire agree on: frames, and how a failure travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from arealite.api.env_server import Refusal
from arealite.base import errors
from arealite.base.errors import ArealiteError, EpisodeError, InvariantError, UserError

encode = msgspec.json.Encoder().encode
SERVING = "serving on "
"""What the line on a server's stdout begins with that tells host:port, once it listens."""
CAPACITY, INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
FATAL: dict[str, type[ArealiteError]] = {
    f"error:{kind.__name__}": kind for kind in (UserError, InvariantError)
}
"""What stops a run wherever its environment runs, by failure class."""
INVALID_ACTION = "env_action_invalid"
"""As a failure class: the server cannot follow a message; its session stays as it was."""
MAX_NAME, MAX_TEXT = 64, 2000
MAX_PARTS = 2**16
"""Brackets and braces in a message, those in texts included. Each list or object costs about 0.5 us
of CPU time, because Python's garbage collector visits all of them."""


T = TypeVar("T")


class MessageTooLarge(EpisodeError):
    """A message between an environment's server and a client is longer than either allows."""

    failure_class = "env_message_too_large"


class RemoteFailure(EpisodeError):
    """An episode failed where its environment runs; of the class that it has there."""

    def __init__(self, message: str, failure_class: str) -> None:
        super().__init__(message)
        self.failure_class = failure_class


class Refused(Exception):
    """A message that the server cannot follow; the session stays as it was."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.code = code


def decoder(kind: type[T]) -> Callable[[bytes | str | msgspec.Raw], T]:
    """Return a function that decodes a message, or a part of a message.

    It raises Refused or msgspec.MsgspecError.
    """
    decode = msgspec.json.Decoder(kind).decode

    def checked(raw: bytes | str | msgspec.Raw) -> T:
        text = raw.encode() if isinstance(raw, str) else bytes(raw)
        parts = text.count(b"[") + text.count(b"{")
        if parts > MAX_PARTS:
            raise Refused(f"{parts} brackets and braces; at most {MAX_PARTS}", "TOO_MANY_PARTS")
        try:
            return decode(text)
        except (RecursionError, UnicodeDecodeError) as error:
            raise Refused(str(error), "INVALID_JSON") from error

    return checked


def frame(kind: str, data: Any, max_bytes: int) -> str:
    """Return a message as text.

    Raises:
        MessageTooLarge: it is longer than `max_bytes`.
        TypeError: the data is none that JSON can hold.
    """
    raw = encode({"type": kind, "data": data})
    if len(raw) > max_bytes:
        what = f"a message of {len(raw)} bytes; max_message_kb={max_bytes // 1024}"
        raise MessageTooLarge(what)
    return raw.decode()


def refusal(error: BaseException) -> Refusal:
    """Return what a client is told of an error."""
    text = str(error)[:MAX_TEXT]
    if isinstance(error, Refused):
        return Refusal(text, error.code)
    if isinstance(error, msgspec.MsgspecError):
        is_json = isinstance(error, msgspec.ValidationError)
        return Refusal(text, INVALID if is_json else "INVALID_JSON")
    kind = errors.failure_class(error)
    said = text if isinstance(error, ArealiteError) else f"{type(error).__name__}: {text}"
    return Refusal(said, failure_class=kind)


def failure(told: Refusal, where: str) -> ArealiteError:
    """Return the error that a refusal tells of, as it would have been raised here."""
    text = f"{told.message[:MAX_TEXT]} ({where})"
    name = told.failure_class[:MAX_NAME]
    if name in FATAL:
        return FATAL[name](text)
    refused = INVALID_ACTION if told.code == INVALID else "env_server_error"
    return RemoteFailure(text, name or refused)
