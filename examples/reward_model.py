"""A reward model of preferences (Bradley-Terry): of two answers, score the better one higher.

    python3 examples/reward_model.py model.path=/models/Qwen2.5-1.5B-Instruct \\
        dataset.train=pairs.jsonl

Rows have the format of examples/dpo.py. The result, RUN/export, is a sequence classifier with one
label.
On a laptop:

    python3 examples/reward_model.py

Watch eval/accuracy, the share of held-out pairs whose chosen answer has the higher score (on a
laptop, after 16 steps: 0.97).
"""

from _run import sorting, train
from dpo import pairs

OPTIONS = [
    "trainer.type=reward",
    "trainer.offline.lr=1e-5",
    "trainer.offline.batch_size=64",
    "trainer.offline.max_tokens=4096",
    "trainer.offline.engine.fsdp.dtype=bfloat16",
    "trainer.offline.engine.fsdp.gradient_checkpointing=true",
]


def laptop() -> list[str]:
    model, *_ = sorting()
    return [model, *pairs(), "trainer.offline.engine.fsdp.dtype=float32", "trainer.offline.lr=1e-3"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
