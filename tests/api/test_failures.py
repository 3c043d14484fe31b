"""The detail of a failed episode names the user's line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from arealite.api.episode import Action
from arealite.api.rollout_messages import make_failure


def test_place_is_the_last_line_that_is_of_no_library() -> None:
    """`dataclasses.replace` raises inside the standard library."""
    action: Any = Action(text="answer", response=None)
    with pytest.raises(TypeError) as raised:
        dataclasses.replace(action, text="other")
    failure = make_failure(raised.value)
    assert failure.failure_class == "error:TypeError"
    assert f"({__file__}:" in failure.detail
