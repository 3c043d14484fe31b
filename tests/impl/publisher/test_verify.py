"""Who of some servers holds the wrong weights, from what they show."""

from __future__ import annotations

from arealite.impl.publisher.verify import Print, wrong

KIND = ("sglang", "0.5.23", "1", "checksum", "float32")


def shown(value: str | tuple[float, ...], staged: int = 1, kind: tuple[str, ...] = KIND) -> Print:
    return Print(kind, staged, value)


def test_all_agree() -> None:
    assert wrong({"a": shown("x"), "b": shown("x")}, {}) == {}


def test_the_majority_wins_and_the_reason_has_both_values() -> None:
    found = wrong({"a": shown("x"), "b": shown("y"), "c": shown("y")}, {})
    assert found == {"a": "holds x, b holds y"}


def test_a_tie_puts_all_in_doubt() -> None:
    assert set(wrong({"a": shown("x"), "b": shown("y")}, {})) == {"a", "b"}
    three = {"a": shown("x"), "b": shown("y"), "c": shown("z")}
    assert set(wrong(three, {})) == {"a", "b", "c"}


def test_servers_of_other_kinds_are_not_compared() -> None:
    other = (*KIND[:-1], "bfloat16")
    assert wrong({"a": shown("x"), "b": shown("y", kind=other)}, {}) == {}


def test_one_alone_changes_exactly_when_the_bytes_do() -> None:
    before = {"a": shown("x", staged=1)}
    assert wrong({"a": shown("y", staged=2)}, before) == {}
    assert wrong({"a": shown("x", staged=1)}, before) == {}
    assert "as before" in wrong({"a": shown("x", staged=2)}, before)["a"]
    assert "of the same weights" in wrong({"a": shown("y", staged=1)}, before)["a"]


def test_logprobs_may_differ_as_their_dtype_does() -> None:
    logprobs = (*KIND[:3], "logprobs", "float32")
    near = {"a": shown((-1.0, -2.0), kind=logprobs), "b": shown((-1.0, -2.0005), kind=logprobs)}
    assert wrong(near, {}) == {}
    far = near | {"b": shown((-1.0, -2.05), kind=logprobs)}
    assert set(wrong(far, {})) == {"a", "b"}
    coarse = {name: shown(each.value, kind=(*KIND[:4], "bfloat16")) for name, each in far.items()}
    assert wrong(coarse, {}) == {}
    assert set(wrong(near | {"b": shown((-1.0,), kind=logprobs)}, {})) == {"a", "b"}


def test_logprobs_of_one_alone_need_not_move() -> None:
    before = {"a": shown((-1.0,), staged=1)}
    assert wrong({"a": shown((-1.0,), staged=2)}, before) == {}
