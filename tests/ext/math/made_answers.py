"""Synthetic completions with verdicts, in the style of GSM8K and MATH: a thousand per form.

Every row has distracting sentences with other numbers, intermediate results, and the words answer,
answers and answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

FORMS = "boxed", "hashes", "sentence"
KINDS = (
    "integer", "negative", "thousands", "decimal", "fraction", "percent", "money", "unit", "latex",
    "mixed", "equation",
)  # fmt: skip
NAMES = "Kelsey", "Tom", "Ada", "Jun", "Fatou"
UNITS = "km", "hours", "apples", "cm^2", "km/h", "square metres", "dollars", "kg"
DISTRACTIONS = (
    "{name} answered {a}+{b}={c} correctly.",
    "There were {a} questions, and {name} had the right answers to {b} of them.",
    "If every answer is worth {a} points, then {b} answers are {c} points.",
    "First, {a} * {b} = <<{a}*{b}={c}>>{c}.",
    "{name} thinks that the answer is {c}, but forgot {a}.",
    "That leaves ${a} - {b} = {d}$ for the rest, or {e}%.",
    "In {year}, {name} paid ${a}.50 for {b} of them, which is {e}% less.",
    "So we need \\(\\frac{{{a}}}{{{b}}}\\) of {c}.",
    "{a} people gave no answer at all.",
    "{name}'s answer: {c}.",
)


class Row(NamedTuple):
    """A completion, a ground truth, and whether the completion answers with it."""

    completion: str
    truth: str
    is_right: bool


def rows(form: str, count: int) -> Iterator[Row]:
    """Yield `count` rows of a form, half of them right."""
    dice = random.Random(f"answers/{form}")
    for index in range(count):
        value = number(dice, kind := KINDS[index % len(KINDS)])
        truth = truths(dice, value, kind)
        is_right = index // len(KINDS) % 2 == 0
        said = value if is_right else wrong(dice, value)
        before = [distraction(dice, value) for _ in range(dice.randint(1, 4))]
        text = dice.choice((" ", "\n")).join(before)
        yield Row(marked(dice, form, text, written(dice, said, kind, form)), truth, is_right)


def number(dice: random.Random, kind: str) -> Fraction:
    """Return a value that the form can express."""
    if kind == "negative":
        return Fraction(-dice.randint(1, 5000))
    if kind in ("thousands", "money"):
        return Fraction(dice.randint(1000, 9_999_999))
    if kind == "decimal":
        return Fraction(dice.randint(1, 99_999) * 4 + 1, dice.choice((4, 20, 100)))
    if kind in ("fraction", "mixed"):
        below = dice.randint(3, 19)
        above = dice.choice([n for n in range(1, below * 4) if n % below])
        return Fraction(above + (below if kind == "mixed" else 0), below)
    return Fraction(dice.randint(2, 900))


def wrong(dice: random.Random, value: Fraction) -> Fraction:
    """Return another value of the same kind: a part of a fraction remains a part."""
    return value + dice.choice((-1, 1)) * dice.randint(1, 9) * (1 if value > 9 or value < 0 else -1)


def truths(dice: random.Random, value: Fraction, kind: str) -> str:
    """Write a ground truth as data sets do."""
    if kind == "decimal":
        return decimal(value)
    if value.denominator > 1:
        return dice.choice((f"{value}", latex(value)))
    return dice.choice((f"{value}", f"{int(value):,}")) if kind == "thousands" else f"{value}"


def written(dice: random.Random, value: Fraction, kind: str, form: str) -> str:
    """Write an answer in one of the ways of its kind."""
    if kind == "decimal" or value.denominator > 1:
        ways = [decimal(value)] if kind == "decimal" else [f"{value}", latex(value)]
        if kind == "mixed" and value > 1:
            whole, rest = divmod(value.numerator, value.denominator)
            ways = [f"{whole} {rest}/{value.denominator}"]
            ways += [f"{whole}\\frac{{{rest}}}{{{value.denominator}}}"]
        return dice.choice(ways)
    plain, grouped = f"{value}", f"{int(value):,}"
    ways = {
        "thousands": (grouped, plain, grouped.replace(",", "\\,"), grouped.replace(",", "{,}")),
        "percent": (f"{plain}%", f"{plain}\\%", f"{plain} percent"),
        "money": (f"${grouped}", f"\\${plain}", f"{plain} dollars", f"{plain}.00", f"€{plain}"),
        "unit": (f"{plain} {dice.choice(UNITS)}", f"{plain}\\text{{ {dice.choice(UNITS)}}}"),
        "latex": (f"${plain}$", f"\\({plain}\\)", f"\\text{{{plain}}}", f"+{plain}", f"{plain}."),
        "equation": (f"x = {plain}", f"{value - 3} + 3 = {plain}", f"x={value * 2}/2={plain}"),
        "negative": (plain, plain.replace("-", "\u2212"), f"-{-value}", f"-{-int(value):,}"),
    }
    if form == "hashes" and kind == "latex":
        return dice.choice((plain, f"**{plain}**", f"${plain}$"))
    return dice.choice(ways.get(kind, (plain,)))


def marked(dice: random.Random, form: str, text: str, answer: str) -> str:
    """Append the answer to the reasoning."""
    if form == "boxed":
        bare = answer.strip("$") if answer.endswith("$") else answer
        bare = bare.removeprefix("\\(").removesuffix("\\)")
        box = f"\\boxed{{{bare}}}"
        how = ("So $X$.", "X", "The answer is X.", "\\[ X \\]", "$$X$$", "Answer: X\nI am sure.")
        return f"{text}\n{dice.choice(how).replace('X', box)}"
    if form == "hashes":
        return f"{text}\n####{dice.choice((' ', '', '  '))}{answer}{dice.choice(('', chr(10)))}"
    how = (
        "The answer is X.", "the answer is X", "Therefore, the answer is: X.", "**Answer:** X",
        "So the final answer is X.", "Answer: X", "The answer to the question is X. I hope so!",
    )  # fmt: skip
    return f"{text}\n{dice.choice(how).replace('X', answer)}"


def distraction(dice: random.Random, value: Fraction) -> str:
    """Write a sentence with numbers, the value itself among them at times."""
    a, b = dice.randint(2, 60), dice.randint(2, 9)
    c = int(value) + dice.choice((0, 1, a))
    facts = {"a": a, "b": b, "c": c, "d": a - b, "e": dice.randint(1, 99)}
    year, name = dice.randint(1950, 2030), dice.choice(NAMES)
    return dice.choice(DISTRACTIONS).format(**facts, name=name, year=year)


def decimal(value: Fraction) -> str:
    """Write a value that ends with a decimal point; one of another kind too, to four places."""
    return f"{float(value):.4f}".rstrip("0").rstrip(".")


def latex(value: Fraction) -> str:
    """Write a fraction in LaTeX."""
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


# ---------------------------------------------------------------- cheats

CHEATS = (
    "", " ", "\n", "####", "####   ", "\\boxed{}", "\\boxed", "Γ \\boxed{}", "The answer is",
    "answer:", "#### Ω Γ", "#### Γ Ω", "#### Ω or Γ", "#### Ω, Γ", "#### Γ/Ω", "#### Γ #### Ω Γ",
    "#### x = Ω or Γ", "#### Ω\n#### Γ, Ω", "#### either Γ or Ω", "#### Γ-Ω", "#### {Γ, Ω}",
    "\\boxed{Ω} \\boxed{Γ}", "\\boxed{Γ}\\boxed{Ω}", "\\boxed{Γ} or \\boxed{Ω}",
    "\\boxed{Ω}, \\boxed{Γ}", "\\boxed{Ω} and \\boxed{Γ}", "$\\boxed{Ω}$ or $\\boxed{Γ}$",
    "\\boxed{Γ, Ω}", "\\boxed{Γ or Ω}", "\\boxed{Ω \\text{ or } Γ}", "\\boxed{\\{Γ, Ω\\}}",
    "\\boxed{\\{Ω, Γ\\}}", "\\boxed{(Ω, Γ)}", "\\boxed{[Ω, Γ]}", "\\boxed{[Γ, Γ]}",
    "\\boxed{x \\in [Ω, Γ]}", "\\boxed{x = Ω, x = Γ}", "\\boxed{x = Ω \\text{ or } x = Γ}",
    "\\boxed{x \\le Γ}", "\\boxed{x < Ω}", "\\boxed{Γ \\pm 0}", "\\boxed{Γ; Ω}", "\\boxed{Γ | Ω}",
    "\\boxed{Ω \\lor Γ}", "\\boxed{Ω \\quad Γ}", "\\boxed{Ω\\\\Γ}",
    "\\boxed{\\begin{matrix} Ω \\\\ Γ \\end{matrix}}", "\\boxed{\\text{Γ and Ω}}",
    "The answer is Ω or Γ.", "The answer is Γ or Ω.", "The answer is either Ω or Γ.",
    "The answer is Ω, Γ.", "The answer is Ω and Γ.", "The answer is between Ω and Γ.",
    "The answer is Ω Γ", "The answer is Ω/Γ", "The answer is Ω apples or Γ apples.",
    "Answer: Ω | Γ", "Answer: x=Ω or x=Γ", "answer: x=Ω or Γ", "The answers are Ω, Γ and Ω.",
    "Ω or Γ", "Γ or Ω", "x=Ω or Γ", "x = Ω or x = Γ", "Ω, Γ", "1, 2, 3, 4, 5, Γ", "1 2 3 4 5 Γ",
    "It could be Ω, or Γ", "{Ω, Γ}", "[Ω, Γ]", "(Ω, Γ)", "Ω-Γ", "Ω/Γ", "from Ω to Γ",
    "\\boxed{α + β}", "α + β", "Calculate α + β.", "What is α + β?", "The answer is α + β.",
    "#### α + β", "\\boxed{1 \\cdot Γ}", "\\boxed{0+Γ}", "What is 0 + Γ?", "1 * Γ", "\\boxed{δ/2}",
    "#### δ/2", "\\boxed{\\frac{δ}{2}}", "What is δ / 2?", "\\boxed{\\sqrt{σ}}", "\\boxed{Γ^1}",
    "\\boxed{\\lfloor Γ \\rfloor}", "\\boxed{Γ = α + β}", "\\boxed{\\max(Ω, Γ)}",
    "\\boxed{\\frac{0}{0}}", "\\boxed{\\infty}", "\\boxed{nan}", "nan", "inf",
    "\\boxed{0 \\cdot \\infty}", "\\boxed{\\infty - \\infty}", "\\boxed{\\mathbb{R}}",
    "\\boxed{\\emptyset}", "\\boxed{x}", "\\boxed{Γ x}", "\\boxed{Γx}", "\\boxed{Γxy}",
    "\\boxed{Γ\\pi}", "\\boxed{Γ!}", "\\boxed{Γ million}", "\\boxed{0=0}", "\\boxed{x=x}", "True",
    "\\boxed{True}", "\\boxed{9^{9^{9^{9}}}}", "9**9**9", "\\boxed{(10^9)!}", "\\boxed{υ}",
    "#### υ", "The answer is υ.", "\\boxed{ζ}", "#### ζ", "Γ\u200bΩ", "\\boxed{ground\\_truth}",
    "gold", "\\boxed{\\text{gold}}", "the correct answer", "\\boxed{\\text{the right answer}}",
    "Question: what is α + β? #### <your answer>", "Put the final answer in \\boxed{}.",
    "print(Γ)\n#### ?", "#### Γ?Ω", "#### \\frac{Γ}{0}",
)  # fmt: skip
"""Γ is the truth, Ω another number, α + β = δ / 2 = Γ and σ = Γ²; υ is Γ in Arabic digits, and ζ
contains a zero-width space."""


def cheats(count: int) -> Iterator[Row]:
    """Yield `count` completions that contain the truth or an equal value without answering."""
    dice = random.Random("answers/cheats")
    for index in range(count):
        gold = dice.randint(20, 900)
        other, part = gold + dice.choice((-7, -1, 3, 11)), dice.randint(1, 19)
        facts = {
            "Γ": gold, "Ω": other, "α": part, "β": gold - part, "δ": 2 * gold, "σ": gold**2,
            "υ": "".join(chr(0x660 + int(digit)) for digit in str(gold)),
            "ζ": "\u200b".join(str(gold)),
        }  # fmt: skip
        text = CHEATS[index % len(CHEATS)]
        if index >= len(CHEATS):
            text = f"{distraction(dice, Fraction(part))} {text}"
        for letter, fact in facts.items():
            text = text.replace(letter, str(fact))
        yield Row(text, str(gold), is_right=False)
