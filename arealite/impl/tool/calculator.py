"""A calculator: its own small parser and exact fractions, so that nothing it is given can run or
last."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from typing import Any

from arealite.api.tool import Tool, ToolError, function

MAX_CHARS, MAX_DEPTH = 500, 32
MAX_BITS = 4096
"""Of a numerator or denominator: 1,234 digits."""
DIGITS = 12
"""Of a result that is not exact, or has no end."""
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?)|(?P<name>[A-Za-z]\w*)"
    r"|(?P<sign>\*\*|//|[-+*/%^(),]))",
    re.ASCII,
)
BINDS = {"+": 10, "-": 10, "*": 20, "/": 20, "//": 20, "%": 20, "**": 40, "^": 40}
"""How tightly each operator binds; a sign in front of a number does by 30."""
CONSTANTS = {"pi": Fraction(math.pi), "e": Fraction(math.e)}


def evaluate(text: str) -> str:
    """Return the value of an arithmetic expression, exact where it has an end.

    Raises:
        ToolError: it is none, has no value, or is too long or too large.
    """
    try:
        return show(_Parser(text).parse())
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("a number is too large") from None
    except (ValueError, TypeError) as error:  # a function's, as math.log(-1)
        raise ToolError(str(error)) from None


def show(value: Fraction) -> str:
    """Write a number: an integer or a decimal with all its digits, else the first twelve."""
    top, bottom = Decimal(value.numerator), Decimal(value.denominator)
    context = Context(prec=MAX_BITS)
    exact = context.divide(top, bottom)
    if not context.flags[Inexact] and int(exact.as_tuple().exponent) >= -DIGITS:
        return f"{exact:f}"
    return str(Context(prec=DIGITS).divide(top, bottom)).lower()


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Raise to a power; exactly, where the exponent is an integer."""
    if exponent.denominator != 1:
        return Fraction(math.pow(base, exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * (bits - 1) > MAX_BITS:
        raise ToolError("the result is too large")
    return base ** int(exponent)


def sqrt(value: Fraction) -> Fraction:
    """Take the square root; exactly, where it is a fraction."""
    if value < 0:
        raise ToolError("square root of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    exact = Fraction(top, bottom)
    return exact if exact * exact == value else Fraction(math.sqrt(value))


OPERATORS: dict[str, Callable[[Fraction, Fraction], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": power,
    "^": power,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "round": lambda value, places=Fraction(0): round(value, max(-999, min(999, int(places)))),
    "sin": math.sin,
    "sqrt": sqrt,
    "tan": math.tan,
}


class _Parser:
    """Evaluates while it reads (V. Pratt, Top Down Operator Precedence, 1973)."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
        self.text, self.at, self.depth, self.token = text, 0, 0, ""
        self._next()

    def parse(self) -> Fraction:
        value = self._expression(0)
        if self.kind:
            raise self._unexpected()
        return value

    def _next(self) -> str:
        """Move to the next token; return the one left behind."""
        left = self.token
        match = TOKEN.match(self.text, self.at)
        self.token, self.kind = (
            (match[match.lastgroup or 0], match.lastgroup) if match else ("", None)
        )
        if match is None and (rest := self.text[self.at :].strip()):
            self.token = rest[0]
            raise self._unexpected()
        self.at = match.end() if match else len(self.text)
        return left

    def _expression(self, binds: int) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolError(f"nested deeper than {MAX_DEPTH}")
        value = self._operand()
        while BINDS.get(self.token, -1) > binds:
            sign = self._next()
            # A power groups to the right: what follows may bind as tightly.
            right = self._expression(BINDS[sign] - (BINDS[sign] == 40))
            value = _bounded(OPERATORS[sign](value, right))
        self.depth -= 1
        return value

    def _operand(self) -> Fraction:
        if not self.kind or (self.kind == "sign" and self.token not in ("+", "-", "(")):
            raise self._unexpected()
        kind, token = self.kind, self._next()
        if kind == "number":
            return _bounded(Fraction(token))
        if token in ("+", "-"):
            value = self._expression(30)
            return -value if token == "-" else value
        if token == "(":
            return self._until_closed()[0]
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token not in FUNCTIONS:
            known = ", ".join([*FUNCTIONS, *CONSTANTS])
            raise ToolError(f"unknown name '{token}'; known: {known}")
        if self.token != "(":
            raise self._unexpected()
        self._next()
        return _bounded(FUNCTIONS[token](*self._until_closed(many=True)))

    def _until_closed(self, *, many: bool = False) -> list[Fraction]:
        """Read expressions up to the closing parenthesis."""
        values = [self._expression(0)]
        while many and self.token == ",":
            self._next()
            values.append(self._expression(0))
        if self.token != ")":
            raise self._unexpected()
        self._next()
        return values

    def _unexpected(self) -> ToolError:
        where = f"'{self.token}'" if self.token else "end"
        read = self.text[: self.at].strip().removesuffix(self.token).rstrip()
        return ToolError(f"unexpected {where} after '{read}'")


def _bounded(value: Any) -> Fraction:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the result is too large")
    return value


class CalculatorTool(Tool):
    """Evaluates an expression."""

    deterministic = True
    schema = function(
        "calculator",
        "Evaluate an arithmetic expression: + - * / // % ** ( ), "
        + ", ".join([*FUNCTIONS, *CONSTANTS]),
        required=("expression",),
        expression={"type": "string", "description": "as in (17 + 4) * 2 ** 0.5"},
    )

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Return the value of the expression."""
        return evaluate(arguments["expression"])
