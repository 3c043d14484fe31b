"""Direct preference optimization (arXiv 2305.18290): of two answers, prefer the better one.

    python3 examples/dpo.py model.path=/models/Qwen2.5-1.5B-Instruct dataset.train=pairs.jsonl

A row has `chosen` and `rejected`, as message lists, or as texts with a `prompt`. The run starts no
server. The reference is the start model; its logprobs are computed for each batch. On a laptop, the
chosen answer has the digits in order, and the rejected answer has them unsorted:

    python3 examples/dpo.py

Watch eval/margin: beta times the difference between the policy's and the reference's preference for
the chosen answer. Watch eval/accuracy: the share of pairs with a margin above 0 (on a laptop, after
16 steps: 0.98). examples/reward_model.py trains on the same rows.
"""

import random

from _run import sorting, train, write

OPTIONS = [
    "trainer.type=dpo",
    "trainer.dpo.beta=0.1",
    "trainer.dpo.loss=sigmoid",  # or ipo, hinge
    "trainer.offline.lr=1e-6",
    "trainer.offline.optimizer.schedule=cosine",
    "trainer.offline.batch_size=64",
    "trainer.offline.max_tokens=4096",
    "trainer.offline.engine.fsdp.dtype=bfloat16",
    "trainer.offline.engine.fsdp.gradient_checkpointing=true",
]


def laptop() -> list[str]:
    model, *_ = sorting()
    return [model, *pairs(), "trainer.offline.engine.fsdp.dtype=float32", "trainer.offline.lr=3e-4"]


def pairs() -> list[str]:
    """Write pairs of six digits, sorted and unsorted; return the options with their files."""
    dice = random.Random(1)
    digits = ["".join(dice.sample("987654321", k=6)) for _ in range(1280)]
    both = [(d, "".join(sorted(d))) for d in digits]
    rows = [{"prompt": f"{d}=", "chosen": s, "rejected": d} for d, s in both if s != d]
    return [
        f"dataset.train={write('pairs.jsonl', rows[256:])}",
        f"dataset.eval={write('pairs-eval.jsonl', rows[:256])}",
    ]


if __name__ == "__main__":
    train(OPTIONS, laptop)
