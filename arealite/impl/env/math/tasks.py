"""Generate questions with integer answers. Each answer is known when its question is written.

Kinds: arithmetic, algebra, word (a situation) and multi_step (a story with several events).
Higher levels, 1 to 5, have larger numbers, longer expressions, harder equations, longer stories.
"""

import random

Question = tuple[str, int]
TOP = {1: 9, 2: 20, 3: 50, 4: 100, 5: 500}
"""Largest number in a question by level; products may be larger."""
NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kofi")
THINGS = ("apples", "stamps", "marbles", "books", "coins", "tickets", "shells", "pencils")


# ------------------------------------------------------------ arithmetic


def arithmetic(rng: random.Random, level: int) -> Question:
    """Ask for the value of an expression of 2 to 5 numbers."""
    text, value = expression(rng, size=max(2, level), top=TOP[level])
    ask = rng.choice(("What is {}?", "Calculate {}.", "Work out the value of {}.", "{} = ?"))
    return ask.format(text), value


def expression(rng: random.Random, *, size: int, top: int) -> Question:
    """Return an expression of `size` numbers and its value; divisions have no remainder."""
    if size == 1:
        value = rng.randint(1, top)
        return str(value), value
    left = rng.randint(1, size - 1)
    (a, x), (b, y) = (expression(rng, size=n, top=top) for n in (left, size - left))
    a, b = (f"({each})" if " " in each else each for each in (a, b))
    sign = rng.choice("+-*/")
    if sign == "/" and y and x % y == 0:
        return f"{a} / {b}", x // y
    if sign == "*" and abs(x * y) <= top * top:
        return f"{a} * {b}", x * y
    return (f"{a} - {b}", x - y) if sign == "-" else (f"{a} + {b}", x + y)


# ------------------------------------------------------------ algebra


def algebra(rng: random.Random, level: int) -> Question:
    """Ask for the unknown of an equation; level 5 has two equations."""
    top = TOP[level]
    x = rng.randint(-top, top)
    a = rng.randint(2, 9)
    b = rng.randint(1, top)
    c = 1
    name = rng.choice("xyznk")
    if level == 1:
        given = f"{name} + {b} = {x + b}"
    elif level == 2:
        given = f"{a}{name} + {b} = {a * x + b}"
    elif level == 3:
        c = a + rng.randint(1, 5)
        given = f"{c}{name} + {b} = {a}{name} + {(c - a) * x + b}"
    elif level == 4:
        c = a + rng.randint(1, 5)
        given = f"{c}({name} + {b}) = {a}({name} - {b}) + {(c - a) * x + (c + a) * b}"
    else:
        other = "m"
        y = rng.randint(-top, top)
        given = f"{a}{name} + {other} = {a * x + y} and {name} - {other} = {x - y}"
    ask = ("Solve for {n}: {g}.", "If {g}, what is {n}?", "Find {n} such that {g}.")
    return rng.choice(ask).format(n=name, g=given), x


# ------------------------------------------------------------ word


def word(rng: random.Random, level: int) -> Question:
    """Describe a situation and ask for a number in it."""
    return rng.choice((shopping, travel, sharing, ages, rectangle))(rng, TOP[level], level)


def shopping(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a price; from level 3 for the change."""
    count = rng.randint(2, top)
    price = rng.randint(1, top)
    who = rng.choice(NAMES)
    what = rng.choice(THINGS)
    cost = count * price
    text = f"{who} buys {count} {what} for {price} dollars each. "
    if level < 3:
        return text + f"How many dollars does {who} pay?", cost
    paid = cost + rng.randint(1, top)
    return text + f"{who} pays with {paid} dollars. How many dollars are given back?", paid - cost


def travel(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a distance; from level 2 in half of the questions for a time."""
    speed = rng.randint(2, 10 + top)
    hours = rng.randint(2, 1 + top)
    what = rng.choice(("train", "truck", "ship", "cyclist"))
    if level > 1 and rng.random() < 0.5:
        text = f"A {what} goes {speed} km in an hour. How many hours does it need for "
        return f"{text}{speed * hours} km?", hours
    text = f"A {what} goes {speed} km in an hour. How far does it get in {hours} hours, in km?"
    return text, speed * hours


def sharing(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a share; from level 3 for the remainder."""
    people = rng.randint(2, 9)
    each = rng.randint(1, top)
    what = rng.choice(THINGS)
    left = rng.randrange(people) if level >= 3 else 0
    text = f"{people} friends share {people * each + left} {what} so that all get the same number"
    if level >= 3:
        return f"{text}, as many as possible. How many {what} are left over?", left
    return f"{text}. How many does each get?", each


def ages(rng: random.Random, top: int, level: int) -> Question:
    """Ask for an age relative to another person's, from level 3 in the future."""
    one, other = rng.sample(NAMES, 2)
    age = rng.randint(2, 20 + top)
    years = rng.randint(1, 10 + top)
    times = rng.randint(2, 4)
    if level < 3:
        text = f"{one} is {age} years old. {other} is {years} years older. How old is {other}?"
        return text, age + years
    text = f"{one} is {age} years old, and {other} is {times} times as old. "
    return f"{text}How old will {other} be in {years} years?", age * times + years


def rectangle(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a perimeter or an area; from level 3 for a perimeter, given the area."""
    wide = rng.randint(2, 1 + top)
    high = rng.randint(2, 1 + top)
    shape = f"A rectangle is {wide} m wide and {high} m high. "
    if level > 2:
        area = f"A rectangle has an area of {wide * high} square metres and is {wide} m wide. "
        return f"{area}What is its perimeter, in metres?", 2 * (wide + high)
    if rng.random() < 0.5:
        return f"{shape}What is its perimeter, in metres?", 2 * (wide + high)
    return f"{shape}What is its area, in square metres?", wide * high


# ------------------------------------------------------------ multi_step


def multi_step(rng: random.Random, level: int) -> Question:
    """Describe `level` + 1 events that change a number of things; ask for the final number."""
    who = rng.choice(NAMES)
    what = rng.choice(THINGS)
    top = TOP[level]
    have = rng.randint(2, top)
    story = [f"{who} has {have} {what}."]
    for _ in range(level + 1):
        number = rng.randint(1, top)
        factor = rng.randint(2, 5)
        event = rng.choice(("finds", "gives", "times", "keeps"))
        if event == "gives" and number < have:
            story.append(f"Then {who} gives {number} of them away.")
            have -= number
        elif event == "times" and have * factor <= top * top:
            story.append(f"Then {who} gets so many more that there are {factor} times as many.")
            have *= factor
        elif event == "keeps" and have % factor == 0:
            story.append(f"Then {who} keeps one part of {factor} equal parts, and sells the rest.")
            have //= factor
        else:
            found = (f"Then {who} finds {number} more.", f"A friend adds {number}.")
            story.append(rng.choice(found))
            have += number
    return " ".join([*story, f"How many {what} does {who} have now?"]), have


KINDS = {kind.__name__: kind for kind in (arithmetic, algebra, word, multi_step)}
