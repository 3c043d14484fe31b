"""Supervised fine-tuning on chats, on prompts with completions, or on the samples of a run.

    python3 examples/sft.py model.path=/models/Qwen2.5-1.5B dataset.train=chats.jsonl

A row is {"messages": [{"role": …, "content": …}, …]}, or has prompt and completion. If
dataset.train is a run's folder, training uses the exact tokens of its answers. Only messages of the
assistant have a loss. On a laptop, a tiny model learns to sort digits from examples:

    python3 examples/sft.py

Watch eval/loss, before and after (on a laptop: 0.199 and 0.042). The result is a Hugging Face
folder, RUN/export.
"""

import random

from _run import sorting, train, write

OPTIONS = [
    "trainer.type=sft",
    "trainer.sft.turns=all",  # every assistant message; last: only the last of a chat
    "trainer.offline.lr=1e-5",
    "trainer.offline.optimizer.schedule=cosine",
    "trainer.offline.epochs=2",
    "trainer.offline.batch_size=64",
    "trainer.offline.max_tokens=4096",
    "trainer.offline.engine.fsdp.dtype=bfloat16",
    "trainer.offline.engine.fsdp.gradient_checkpointing=true",
]


def laptop() -> list[str]:
    model, *_ = sorting()
    dice = random.Random(1)
    digits = ["".join(dice.choices("123456789", k=6)) for _ in range(2304)]
    rows = [{"prompt": f"{each}=", "completion": "".join(sorted(each))} for each in digits]
    return [
        model,
        f"dataset.train={write('sft.jsonl', rows[256:])}",
        f"dataset.eval={write('sft-eval.jsonl', rows[:256])}",
        "trainer.offline.engine.fsdp.dtype=float32",
        "trainer.offline.lr=1e-3",
    ]


if __name__ == "__main__":
    train(OPTIONS, laptop)
