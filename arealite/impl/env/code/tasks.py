"""Generate one-line functions to complete, for first runs and curricula."""

from __future__ import annotations

import random

from arealite.api.task import Row

ONE_LINERS = {
    "x plus {a}": ("x+{a}", lambda x, a, b: x + a),
    "x minus {a}": ("x-{a}", lambda x, a, b: x - a),
    "{a} minus x": ("{a}-x", lambda x, a, b: a - x),
    "x times {a}": ("x*{a}", lambda x, a, b: x * a),
    "x times {a} plus {b}": ("x*{a}+{b}", lambda x, a, b: x * a + b),
    "x times {a} minus {b}": ("x*{a}-{b}", lambda x, a, b: x * a - b),
    "the rest of x by {a}": ("x%{a}", lambda x, a, b: x % a),
    "the larger of x and {a}": ("max(x,{a})", lambda x, a, b: max(x, a)),
    "the smaller of x and {a}": ("min(x,{a})", lambda x, a, b: min(x, a)),
    "the square of x plus {a}": ("x*x+{a}", lambda x, a, b: x * x + a),
}
"""By description: the expression, and a function that computes its value."""


def one_line(rng: random.Random) -> Row:
    """Return a random row whose answer is an expression."""
    ask = rng.choice([*ONE_LINERS])
    source, function = ONE_LINERS[ask]
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    arguments = rng.sample(range(-20, 21), 5)
    cases = [{"args": [x], "expected": function(x, a, b)} for x in arguments]
    return {
        "prompt": f"# {ask.format(a=a, b=b)}\ndef f(x): return ",
        "ground_truth": source.format(a=a, b=b),
        "extra_info": {"entry_point": "f", "cases": cases, "data_source": "one_line"},
    }
