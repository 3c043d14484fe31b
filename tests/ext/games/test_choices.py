"""Finding the choice that an answer names."""

from __future__ import annotations

import pytest

from arealite.ext.games.choices import chosen

CHOICES = ("stag", "hare", "stag hunt")


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("stag", "stag"),
        (" Stag.\n", "stag"),
        ("Not hare, so STAG!", "stag"),
        ("stag? no: **hare**", "hare"),
        ("a stag hunt", "stag hunt"),
        ("stags and hares", None),
        ("", None),
        ("s", None),
    ],
)
def test_last_choice_named_as_a_word_counts(text: str, choice: str | None) -> None:
    assert chosen(text, CHOICES) == choice


def test_digits_inside_numbers_are_not_choices() -> None:
    assert chosen("12", ("1", "2")) is None
    assert chosen("<2>", ("1", "2")) == "2"
