"""Wire format shared by environment servers and their clients: messages, limits, failures."""

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from arealite.base import errors
from arealite.base.errors import ArealiteError, EpisodeError, InvariantError, UserError
from arealite.ext.hosting.server_config import SessionFailure

encode = msgspec.json.Encoder().encode
SERVING = "serving on "
"""Start of the line that a listening server prints to stdout; host:port follows."""
CAPACITY = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"
FATAL = {f"error:{kind.__name__}": kind for kind in (UserError, InvariantError)}
"""By failure class: errors that stop the whole run, wherever the environment runs."""
INVALID_ACTION = "env_action_invalid"
"""Failure class: the server refused a message as invalid. Its session is unchanged."""
MAX_NAME = 64
MAX_TEXT = 2000
MAX_PARTS = 2**16
"""Maximum number of brackets and braces in a message, including those in strings. Each list or
object costs about 0.5 us of CPU time, because Python's garbage collector visits it."""


T = TypeVar("T")


class MessageTooLarge(EpisodeError, failure_class="env_message_too_large"):
    """A message is longer than the environment server or its client allows."""


class RemoteFailure(EpisodeError):
    """An episode failed in the environment server. It keeps the failure class it has there."""

    def __init__(self, message: str, failure_class: str) -> None:
        super().__init__(message)
        self.failure_class = failure_class


class MessageRefused(Exception):
    """The server refuses a message. Its session is unchanged."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.code = code


def decoder(kind: type[T]) -> Callable[[bytes | str | msgspec.Raw], T]:
    """Return a function that decodes JSON to `kind`.

    The returned function raises MessageRefused or msgspec.MsgspecError for an invalid message.
    """
    decode = msgspec.json.Decoder(kind).decode

    def checked_decode(raw: bytes | str | msgspec.Raw) -> T:
        encoded = raw.encode() if isinstance(raw, str) else bytes(raw)
        num_parts = encoded.count(b"[") + encoded.count(b"{")
        if num_parts > MAX_PARTS:
            raise MessageRefused(
                f"the message has {num_parts} brackets and braces; the limit is {MAX_PARTS}",
                "TOO_MANY_PARTS",
            )
        try:
            return decode(encoded)
        except (RecursionError, UnicodeDecodeError) as error:
            raise MessageRefused(str(error), "INVALID_JSON") from error

    return checked_decode


def read_token(name: str, section: str = "") -> str:
    """Return the token in the environment variable `name`, the value of `<section>token_env`.

    Returns:
        "" if `name` is "": no token is needed.

    Raises:
        UserError: The variable is not set.
    """
    if name and not os.environ.get(name):
        raise UserError(
            f"{section}token_env={name}: this environment variable is not set. "
            "Export it with the server's token, or name another variable."
        )
    return os.environ.get(name, "")


def frame(kind: str, data: object, max_bytes: int) -> str:
    """Encode a message as JSON.

    Raises:
        MessageTooLarge: The message is longer than `max_bytes`.
        TypeError: JSON cannot represent the data.
    """
    encoded = encode({"type": kind, "data": data})
    if len(encoded) > max_bytes:
        raise MessageTooLarge(
            f"a message has {len(encoded)} bytes, more than max_message_kb={max_bytes // 1024}. "
            "Raise max_message_kb of the server and of the runtime."
        )
    return encoded.decode()


def refusal(error: BaseException) -> SessionFailure:
    """Return the message that tells a client of an error."""
    message = str(error)[:MAX_TEXT]
    if isinstance(error, MessageRefused):
        return SessionFailure(message=message, code=error.code)
    if isinstance(error, msgspec.MsgspecError):
        is_json = isinstance(error, msgspec.ValidationError)
        return SessionFailure(message=message, code=INVALID if is_json else "INVALID_JSON")
    if not isinstance(error, ArealiteError):
        message = f"{type(error).__name__}: {message}"
    return SessionFailure(message=message, failure_class=errors.failure_class(error))


def failure(refused: SessionFailure, server: str) -> ArealiteError:
    """Return the exception that an episode of the client fails with.

    Args:
        refused: The server's error message.
        server: Name of the server, for the exception's text.
    """
    message = f"{refused.message[:MAX_TEXT]} ({server})"
    failure_class = refused.failure_class[:MAX_NAME]
    if failure_class in FATAL:
        return FATAL[failure_class](message)
    default_class = INVALID_ACTION if refused.code == INVALID else "env_server_error"
    return RemoteFailure(message, failure_class or default_class)
