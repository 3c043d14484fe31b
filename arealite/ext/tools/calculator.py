"""A calculator: it parses expressions with `ast` and computes with exact fractions."""

import ast
import math
import operator
import re
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from arealite.api.tool import Tool, ToolError, function

MAX_CHARS = 500
"""Maximum length of an expression."""
MAX_DEPTH = 32
"""Maximum nesting of an expression."""
MAX_BITS = 4096
"""Maximum size of a numerator or denominator."""
DIGITS = 12
"""Digits of a result that is inexact or has no finite decimal form."""
NUMBER = re.compile(r"(?<!\w)(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
CONSTANTS = {"pi": math.pi, "e": math.e}
REASONS = {ZeroDivisionError: "division by zero", OverflowError: "the result is too large"}


def evaluate(expression: str) -> str:
    """Return the value of an arithmetic expression, exact if its decimal form is finite.

    Raises:
        ToolError: The text is not an expression, has no value, or is too long or too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
    one_line = " ".join(expression.split())
    source = one_line.replace("^", "**").encode("ascii", "replace").decode()
    # Replace each number by a name of the same length, so that Python does not parse numbers.
    without_numbers = NUMBER.sub(lambda number: "_" * len(number[0]), source)
    try:
        tree = ast.parse(without_numbers, mode="eval")
        return show(_value(tree.body, source, parentheses_depth(source)))
    except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        message = getattr(error, "msg", str(error))
        raise ToolError(REASONS.get(type(error), message)) from None


def parentheses_depth(source: str) -> int:
    """Return the largest number of parentheses that are open at the same time."""
    depth = 0
    max_depth = 0
    for char in source:
        if char == "(":
            depth += 1
            max_depth = max(max_depth, depth)
        elif char == ")":
            depth -= 1
    return max_depth


def show(value: Fraction) -> str:
    """Format a value: all digits of an integer or a short decimal, else DIGITS digits."""
    is_exact = (value * 10**DIGITS).denominator == 1
    precision = MAX_BITS if is_exact else DIGITS
    numerator = Decimal(value.numerator)
    denominator = Decimal(value.denominator)
    decimal = Context(prec=precision).divide(numerator, denominator)
    return f"{decimal:f}" if is_exact else str(decimal).lower()


def bits(value: Fraction) -> int:
    """Return the size of the larger of numerator and denominator."""
    numerator_bits = value.numerator.bit_length()
    denominator_bits = value.denominator.bit_length()
    return max(numerator_bits, denominator_bits)


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power, exact if the exponent is an integer."""
    if exponent.denominator != 1:
        return Fraction(math.pow(base, exponent))
    min_bits = abs(exponent) * (bits(base) - 1)
    if min_bits > MAX_BITS:
        raise OverflowError
    return Fraction(base**exponent)


def sqrt(value: Fraction) -> Fraction:
    """Return the square root, exact if it is a fraction."""
    root_of_numerator = math.isqrt(value.numerator)
    root_of_denominator = math.isqrt(value.denominator)
    root = Fraction(root_of_numerator, root_of_denominator)
    if root * root == value:
        return root
    return Fraction(math.sqrt(value))


OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "round": lambda x, n=0: round(x, max(-999, min(999, int(n)))),
    "sin": math.sin,
    "sqrt": sqrt,
    "tan": math.tan,
}
SYNTAX = ", ".join(["+ - * / // % ** ( )", *sorted(FUNCTIONS), *CONSTANTS])
"""The operators, functions and constants, for the agent."""


def _value(node: ast.expr, expression: str, depth: int) -> Fraction:
    """Return the value of a syntax node.

    Args:
        node: The node.
        expression: The expression, with its numbers.
        depth: Nesting depth of the node.

    Raises:
        ToolError: The node is not a number, an operation or a call of a known function, or it is
            nested too deeply.
        OverflowError: The value is too large.
    """
    if depth > MAX_DEPTH:
        raise ToolError(f"nested deeper than {MAX_DEPTH}")
    source = expression[node.col_offset : node.end_col_offset]
    match node:
        case ast.Name() if source in CONSTANTS or NUMBER.fullmatch(source):
            value = Fraction(CONSTANTS.get(source, source))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand, expression, depth + 1))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            left_value = _value(left, expression, depth)
            right_value = _value(right, expression, depth + 1)
            value = OPERATORS[type(op)](left_value, right_value)
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            argument_values = [_value(argument, expression, depth) for argument in arguments]
            value = Fraction(FUNCTIONS[name](*argument_values))
        case _:
            raise ToolError(f"unexpected '{source}'; known: {SYNTAX}")
    if bits(value) > MAX_BITS:
        raise OverflowError
    return value


class CalculatorTool(Tool):
    """Evaluates an expression."""

    deterministic = True
    schema = function(
        "calculator",
        f"Evaluate an arithmetic expression: {SYNTAX}",
        required=("expression",),
        expression={"type": "string", "description": "as in (17 + 4) * 2 ** 0.5"},
    )

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Return the value of the expression."""
        return evaluate(arguments["expression"])
