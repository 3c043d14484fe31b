"""A calculator: it parses expressions with `ast` and computes with exact fractions."""

import ast
import math
import re
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate
from operator import add, floordiv, mod, mul, neg, pos, sub, truediv
from typing import Any

from arealite.api.tool import Tool, ToolError, function

MAX_CHARS, MAX_DEPTH, MAX_BITS, DIGITS = 500, 32, 4096, 12
"""Limits: characters and nesting of an expression, bits of a numerator or denominator. DIGITS is
the number of digits of a result that is inexact or has no finite decimal form."""
NUMBER = re.compile(r"(?<!\w)(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
CONSTANTS = {"pi": math.pi, "e": math.e}
REASONS = {ZeroDivisionError: "division by zero", OverflowError: "the result is too large"}


def evaluate(text: str) -> str:
    """Return the value of an arithmetic expression, exact if its decimal form is finite.

    Raises:
        ToolError: The text is not an expression, has no value, or is too long or too large.
    """
    if len(text) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
    text = " ".join(text.split()).replace("^", "**").encode("ascii", "replace").decode()
    depth = max(accumulate((char == "(") - (char == ")") for char in text), default=0)
    # Replace each number by a name of the same length, so that Python does not parse numbers.
    names = NUMBER.sub(lambda number: "_" * len(number[0]), text)
    try:
        return show(_value(ast.parse(names, mode="eval").body, text, depth))
    except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ToolError(REASONS.get(type(error)) or getattr(error, "msg", str(error))) from None


def show(value: Fraction) -> str:
    """Format a value: all digits of an integer or a short decimal, else DIGITS digits."""
    exact = (value * 10**DIGITS).denominator == 1
    top, bottom = map(Decimal, value.as_integer_ratio())
    result = Context(prec=MAX_BITS if exact else DIGITS).divide(top, bottom)
    return f"{result:f}" if exact else str(result).lower()


def bits(value: Fraction) -> int:
    """Return the size of the larger of numerator and denominator."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power, exact if the exponent is an integer."""
    exact = exponent.denominator == 1
    if exact and abs(exponent) * (bits(base) - 1) > MAX_BITS:
        raise OverflowError
    return Fraction(base**exponent if exact else math.pow(base, exponent))


def sqrt(value: Fraction) -> Fraction:
    """Return the square root, exact if it is a fraction."""
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else Fraction(math.sqrt(value))


OPERATORS: dict[type, Any] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
OPERATORS |= {ast.FloorDiv: floordiv, ast.Mod: mod, ast.Pow: power, ast.USub: neg, ast.UAdd: pos}
MATH = ("ceil", "cos", "exp", "floor", "log", "log10", "sin", "tan")
FUNCTIONS: dict[str, Any] = {name: getattr(math, name) for name in MATH}
FUNCTIONS |= {"abs": abs, "max": lambda *values: max(values), "min": lambda *values: min(values)}
FUNCTIONS |= {"sqrt": sqrt, "round": lambda x, n=0: round(x, max(-999, min(999, int(n))))}
KNOWN = ", ".join(["+ - * / // % ** ( )", *sorted(FUNCTIONS), *CONSTANTS])


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    """Return the value of a syntax node.

    Args:
        node: The node.
        text: The expression, with its numbers.
        depth: Nesting depth of the node.

    Raises:
        ToolError: The node is not a number, an operation or a call of a known function, or it is
            nested too deeply.
        OverflowError: The value is too large.
    """
    if depth > MAX_DEPTH:
        raise ToolError(f"nested deeper than {MAX_DEPTH}")
    source = text[node.col_offset : node.end_col_offset]
    match node:
        case ast.Name() if source in CONSTANTS or NUMBER.fullmatch(source):
            value = Fraction(CONSTANTS.get(source, source))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand, text, depth + 1))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left, text, depth), _value(right, text, depth + 1))
        case ast.Call(ast.Name(name), args, []) if name in FUNCTIONS:
            value = Fraction(FUNCTIONS[name](*[_value(arg, text, depth) for arg in args]))
        case _:
            raise ToolError(f"unexpected '{source}'; known: {KNOWN}")
    if bits(value) > MAX_BITS:
        raise OverflowError
    return value


class CalculatorTool(Tool):
    """Evaluates an expression."""

    deterministic = True
    schema = function(
        "calculator",
        f"Evaluate an arithmetic expression: {KNOWN}",
        required=("expression",),
        expression={"type": "string", "description": "as in (17 + 4) * 2 ** 0.5"},
    )

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Return the value of the expression."""
        return evaluate(arguments["expression"])
