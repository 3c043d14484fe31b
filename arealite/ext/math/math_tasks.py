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
    formula, value = expression(rng, size=max(2, level), top=TOP[level])
    templates = (
        "What is {}?",
        "Calculate {}.",
        "Work out the value of {}.",
        "{} = ?",
    )
    return rng.choice(templates).format(formula), value


def expression(rng: random.Random, *, size: int, top: int) -> Question:
    """Return an expression of `size` numbers and its value; divisions have no remainder."""
    if size == 1:
        number = rng.randint(1, top)
        return str(number), number
    left_size = rng.randint(1, size - 1)
    left, x = expression(rng, size=left_size, top=top)
    right, y = expression(rng, size=size - left_size, top=top)
    left = in_brackets(left)
    right = in_brackets(right)
    sign = rng.choice("+-*/")
    if sign == "/" and y and x % y == 0:
        return f"{left} / {right}", x // y
    if sign == "*" and abs(x * y) <= top * top:
        return f"{left} * {right}", x * y
    if sign == "-":
        return f"{left} - {right}", x - y
    return f"{left} + {right}", x + y


def in_brackets(operand: str) -> str:
    """Return an operand in brackets if it has an operator."""
    return f"({operand})" if " " in operand else operand


# ------------------------------------------------------------ algebra


def algebra(rng: random.Random, level: int) -> Question:
    """Ask for the unknown of an equation; level 5 has two equations."""
    top = TOP[level]
    x = rng.randint(-top, top)
    a = rng.randint(2, 9)
    b = rng.randint(1, top)
    name = rng.choice("xyznk")
    if level == 1:
        equation = f"{name} + {b} = {x + b}"
    elif level == 2:
        equation = f"{a}{name} + {b} = {a * x + b}"
    elif level == 3:
        c = a + rng.randint(1, 5)
        equation = f"{c}{name} + {b} = {a}{name} + {(c - a) * x + b}"
    elif level == 4:
        c = a + rng.randint(1, 5)
        constant = (c - a) * x + (c + a) * b
        equation = f"{c}({name} + {b}) = {a}({name} - {b}) + {constant}"
    else:
        y = rng.randint(-top, top)
        equation = f"{a}{name} + m = {a * x + y} and {name} - m = {x - y}"
    templates = (
        "Solve for {name}: {equation}.",
        "If {equation}, what is {name}?",
        "Find {name} such that {equation}.",
    )
    return rng.choice(templates).format(name=name, equation=equation), x


# ------------------------------------------------------------ word


def word(rng: random.Random, level: int) -> Question:
    """Describe a situation and ask for a number in it."""
    situation = rng.choice((shopping, travel, sharing, ages, rectangle))
    return situation(rng, TOP[level], level)


def shopping(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a price; from level 3 for the change."""
    count = rng.randint(2, top)
    price = rng.randint(1, top)
    buyer = rng.choice(NAMES)
    goods = rng.choice(THINGS)
    cost = count * price
    purchase = f"{buyer} buys {count} {goods} for {price} dollars each."
    if level < 3:
        question = f"How many dollars does {buyer} pay?"
        return f"{purchase} {question}", cost
    paid = cost + rng.randint(1, top)
    question = f"{buyer} pays with {paid} dollars. How many dollars are given back?"
    return f"{purchase} {question}", paid - cost


def travel(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a distance; from level 2 in half of the questions for a time."""
    speed = rng.randint(2, 10 + top)
    hours = rng.randint(2, 1 + top)
    distance = speed * hours
    vehicle = rng.choice(("train", "truck", "ship", "cyclist"))
    journey = f"A {vehicle} goes {speed} km in an hour."
    if level > 1 and rng.random() < 0.5:
        return f"{journey} How many hours does it need for {distance} km?", hours
    return f"{journey} How far does it get in {hours} hours, in km?", distance


def sharing(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a share; from level 3 for the remainder."""
    people = rng.randint(2, 9)
    share = rng.randint(1, top)
    goods = rng.choice(THINGS)
    left = rng.randrange(people) if level >= 3 else 0
    total = people * share + left
    situation = f"{people} friends share {total} {goods} so that all get the same number"
    if level >= 3:
        return f"{situation}, as many as possible. How many {goods} are left over?", left
    return f"{situation}. How many does each get?", share


def ages(rng: random.Random, top: int, level: int) -> Question:
    """Ask for an age relative to another person's, from level 3 in the future."""
    first, second = rng.sample(NAMES, 2)
    age = rng.randint(2, 20 + top)
    years = rng.randint(1, 10 + top)
    times = rng.randint(2, 4)
    if level < 3:
        question = (
            f"{first} is {age} years old. {second} is {years} years older. How old is {second}?"
        )
        return question, age + years
    question = (
        f"{first} is {age} years old, "
        f"and {second} is {times} times as old. "
        f"How old will {second} be in {years} years?"
    )
    return question, age * times + years


def rectangle(rng: random.Random, top: int, level: int) -> Question:
    """Ask for a perimeter or an area; from level 3 for a perimeter, given the area."""
    width = rng.randint(2, 1 + top)
    height = rng.randint(2, 1 + top)
    area = width * height
    perimeter = 2 * (width + height)
    if level > 2:
        shape = f"A rectangle has an area of {area} square metres and is {width} m wide."
        return f"{shape} What is its perimeter, in metres?", perimeter
    shape = f"A rectangle is {width} m wide and {height} m high."
    if rng.random() < 0.5:
        return f"{shape} What is its perimeter, in metres?", perimeter
    return f"{shape} What is its area, in square metres?", area


# ------------------------------------------------------------ multi_step


def multi_step(rng: random.Random, level: int) -> Question:
    """Describe `level` + 1 events that change a number of things; ask for the final number."""
    owner = rng.choice(NAMES)
    goods = rng.choice(THINGS)
    top = TOP[level]
    count = rng.randint(2, top)
    story = [f"{owner} has {count} {goods}."]
    for _ in range(level + 1):
        number = rng.randint(1, top)
        factor = rng.randint(2, 5)
        event = rng.choice(("finds", "gives", "times", "keeps"))
        if event == "gives" and number < count:
            story.append(f"Then {owner} gives {number} of them away.")
            count -= number
        elif event == "times" and count * factor <= top * top:
            story.append(f"Then {owner} gets so many more that there are {factor} times as many.")
            count *= factor
        elif event == "keeps" and count % factor == 0:
            story.append(
                f"Then {owner} keeps one part of {factor} equal parts, and sells the rest."
            )
            count //= factor
        else:
            additions = (
                f"Then {owner} finds {number} more.",
                f"A friend adds {number}.",
            )
            story.append(rng.choice(additions))
            count += number
    story.append(f"How many {goods} does {owner} have now?")
    return " ".join(story), count


KINDS = {kind.__name__: kind for kind in (arithmetic, algebra, word, multi_step)}
