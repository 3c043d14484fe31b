"""Write a given word in the asked form, and nothing else: a lesson of form, not of content."""

import random

from arealite.ext.demo.lesson import Lesson, LessonRow, assistant_message

WORDS = """
apple bird boat book bread bridge brother candle chair city cloud coat corn dance day desk dog
door dream dress drum egg farm fire fish flower forest friend game garden gate girl glass gold
grass hand hat hill home horse house island king lake lamp leaf letter light lion milk mirror
moon mother mountain mouse music night nose ocean paper party pen piano pig plant queen rain
ring river road rock roof room rope rose salt sand school sea seed ship shirt shoe silver sister
sky smoke snow song spoon spring star stone storm street sugar summer sun table tea tent tiger
tower town train tree valley village voice wall watch water wind window winter wolf wood world
""".strip()
FORMS = {
    "in square brackets": "[{}]",
    "in quotation marks": '"{}"',
    "in round brackets": "({})",
    "twice, separated by a comma": "{0}, {0}",
    "after the text WORD:": "WORD: {}",
    "between two stars": "*{}*",
    "followed by three dots": "{}...",
    "as JSON with the key word": '{{"word": "{}"}}',
}
"""Forms, as a prompt asks for them, and their patterns."""


def draw(rng: random.Random) -> LessonRow:
    """Draw a task."""
    word = rng.choice(WORDS.split())
    form = rng.choice(list(FORMS))
    question = f"Write the word {word} {form}. Write nothing else."
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "ground_truth": FORMS[form].format(word), "word": word}


def asked_form(completion: str, ground_truth: str, word: str) -> float:
    """Return 1 for the asked form alone, 0.5 for a text with it, 0.1 for a text with the word."""
    answer = completion.strip()
    if answer == ground_truth:
        return 1.0
    if ground_truth in answer:
        return 0.5
    return 0.1 if word in answer else 0.0


LESSON = Lesson(
    about="write a word in the asked form, and nothing else",
    draw=draw,
    key=lambda row: row["prompt"][-1]["content"],
    reward=f"{__name__}:asked_form",
    demonstrate=lambda row: [assistant_message(row["ground_truth"])],
    demonstrations=96,
    warm_start=[
        "trainer.offline.lr=3e-5",
        "trainer.offline.batch_size=16",
        "trainer.offline.max_steps=6",
        "trainer.offline.optimizer.warmup_steps=2",
    ],
    train_rows=256,
    max_new_tokens=16,
    options=[
        "trainer.ppo.total_steps=40",
        "trainer.ppo.batch_size=64",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.schedule=linear",
    ],
)
