"""Questions with integer answers, made with the answer in hand: no check can disagree with them.

Kinds: arithmetic, algebra, word (a situation) and multi_step (a story of several events).
Levels 1 to 5 make numbers larger, expressions longer, equations harder, stories longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Question = tuple[str, int]
TOP = {1: 9, 2: 20, 3: 50, 4: 100, 5: 500}
"""The largest number in a question, by level; products may be larger."""
NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kofi")
THINGS = ("apples", "stamps", "marbles", "books", "coins", "tickets", "shells", "pencils")


def make_question(dice: random.Random, kind: str, level: int) -> Question:
    """Return a question and its answer."""
    return KINDS[kind](dice, level)


# ------------------------------------------------------------ arithmetic


def arithmetic(dice: random.Random, level: int) -> Question:
    """Ask for the value of an expression of 2 to 5 numbers."""
    text, value = expression(dice, size=max(2, level), top=TOP[level])
    ask = dice.choice(("What is {}?", "Calculate {}.", "Work out the value of {}.", "{} = ?"))
    return ask.format(text), value


def expression(dice: random.Random, *, size: int, top: int) -> Question:
    """Return an expression of `size` numbers with its value; divisions leave no rest."""
    if size == 1:
        value = dice.randint(1, top)
        return str(value), value
    left = dice.randint(1, size - 1)
    (a, x), (b, y) = (expression(dice, size=n, top=top) for n in (left, size - left))
    a, b = (f"({each})" if " " in each else each for each in (a, b))
    sign = dice.choice("+-*/")
    if sign == "/" and y and x % y == 0:
        return f"{a} / {b}", x // y
    if sign == "*" and abs(x * y) <= top * top:
        return f"{a} * {b}", x * y
    return (f"{a} - {b}", x - y) if sign == "-" else (f"{a} + {b}", x + y)


# ------------------------------------------------------------ algebra


def algebra(dice: random.Random, level: int) -> Question:
    """Ask for the x of an equation, on level 5 of two."""
    top = TOP[level]
    x, a, b, c = dice.randint(-top, top), dice.randint(2, 9), dice.randint(1, top), 1
    name = dice.choice("xyznk")
    if level == 1:
        given = f"{name} + {b} = {x + b}"
    elif level == 2:
        given = f"{a}{name} + {b} = {a * x + b}"
    elif level == 3:
        c = a + dice.randint(1, 5)
        given = f"{c}{name} + {b} = {a}{name} + {(c - a) * x + b}"
    elif level == 4:
        c = a + dice.randint(1, 5)
        given = f"{c}({name} + {b}) = {a}({name} - {b}) + {(c - a) * x + (c + a) * b}"
    else:
        other, y = "m", dice.randint(-top, top)
        given = f"{a}{name} + {other} = {a * x + y} and {name} - {other} = {x - y}"
    ask = ("Solve for {n}: {g}.", "If {g}, what is {n}?", "Find {n} such that {g}.")
    return dice.choice(ask).format(n=name, g=given), x


# ------------------------------------------------------------ word


def word(dice: random.Random, level: int) -> Question:
    """Describe a situation and ask for a number in it."""
    return dice.choice((shopping, travel, sharing, ages, rectangle))(dice, TOP[level], level)


def shopping(dice: random.Random, top: int, level: int) -> Question:
    """Ask for a price, with level 3 for the change."""
    count, price, who = dice.randint(2, top), dice.randint(1, top), dice.choice(NAMES)
    what, cost = dice.choice(THINGS), count * price
    text = f"{who} buys {count} {what} for {price} dollars each. "
    if level < 3:
        return text + f"How many dollars does {who} pay?", cost
    paid = cost + dice.randint(1, top)
    return text + f"{who} pays with {paid} dollars. How many dollars are given back?", paid - cost


def travel(dice: random.Random, top: int, level: int) -> Question:
    """Ask for a distance or, from level 2, perhaps for the time it takes."""
    speed, hours = dice.randint(2, 10 + top), dice.randint(2, 1 + top)
    what = dice.choice(("train", "truck", "ship", "cyclist"))
    if level > 1 and dice.random() < 0.5:
        text = f"A {what} goes {speed} km in an hour. How many hours does it need for "
        return f"{text}{speed * hours} km?", hours
    text = f"A {what} goes {speed} km in an hour. How far does it get in {hours} hours, in km?"
    return text, speed * hours


def sharing(dice: random.Random, top: int, level: int) -> Question:
    """Ask for a share, from level 3 for what is left over."""
    people, each, what = dice.randint(2, 9), dice.randint(1, top), dice.choice(THINGS)
    left = dice.randrange(people) if level >= 3 else 0
    text = f"{people} friends share {people * each + left} {what} so that all get the same number"
    if level >= 3:
        return f"{text}, as many as possible. How many {what} are left over?", left
    return f"{text}. How many does each get?", each


def ages(dice: random.Random, top: int, level: int) -> Question:
    """Ask for an age, of one who is some years or times older, now or later."""
    one, other = dice.sample(NAMES, 2)
    age, years, times = dice.randint(2, 20 + top), dice.randint(1, 10 + top), dice.randint(2, 4)
    if level < 3:
        text = f"{one} is {age} years old. {other} is {years} years older. How old is {other}?"
        return text, age + years
    text = f"{one} is {age} years old, and {other} is {times} times as old. "
    return f"{text}How old will {other} be in {years} years?", age * times + years


def rectangle(dice: random.Random, top: int, level: int) -> Question:
    """Ask for a perimeter, an area or a side."""
    wide, high = dice.randint(2, 1 + top), dice.randint(2, 1 + top)
    shape = f"A rectangle is {wide} m wide and {high} m high. "
    if level > 2:
        area = f"A rectangle has an area of {wide * high} square metres and is {wide} m wide. "
        return f"{area}What is its perimeter, in metres?", 2 * (wide + high)
    if dice.random() < 0.5:
        return f"{shape}What is its perimeter, in metres?", 2 * (wide + high)
    return f"{shape}What is its area, in square metres?", wide * high


# ------------------------------------------------------------ multi_step


def multi_step(dice: random.Random, level: int) -> Question:
    """Tell of `level` + 1 events that change a number of things, and ask for the last number."""
    who, what, top = dice.choice(NAMES), dice.choice(THINGS), TOP[level]
    have = dice.randint(2, top)
    told = [f"{who} has {have} {what}."]
    for _ in range(level + 1):
        number, factor = dice.randint(1, top), dice.randint(2, 5)
        event = dice.choice(("finds", "gives", "times", "keeps"))
        if event == "gives" and number < have:
            told.append(f"Then {who} gives {number} of them away.")
            have -= number
        elif event == "times" and have * factor <= top * top:
            told.append(f"Then {who} gets so many more that there are {factor} times as many.")
            have *= factor
        elif event == "keeps" and have % factor == 0:
            told.append(f"Then {who} keeps one part of {factor} equal parts, and sells the rest.")
            have //= factor
        else:
            told.append(
                dice.choice((f"Then {who} finds {number} more.", f"A friend adds {number}."))
            )
            have += number
    return " ".join([*told, f"How many {what} does {who} have now?"]), have


KINDS: dict[str, Callable[[random.Random, int], Question]] = {
    "arithmetic": arithmetic,
    "algebra": algebra,
    "word": word,
    "multi_step": multi_step,
}
