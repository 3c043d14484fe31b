"""Programs as answers: each runs against its test cases in a sandbox, and the share passed is the
reward.

    python3 examples/code_sandbox.py model.path=/models/Qwen2.5-Coder-1.5B-Instruct \\
        dataset.train=mbpp.jsonl

Rows are MBPP's, HumanEval's or your own (docs/environments.md); without any, functions of one line
are asked for. It needs bubblewrap. On a laptop, where a tiny model writes
such lines (tools/lessons/code.py):

    python3 examples/code_sandbox.py

Watch reward/parts/solved, /passed and /loaded: the share of programs that pass all cases, of cases
passed, and of programs that load at all.
"""

from _run import ONE_GPU, lesson, train

COLLECTOR = "trainer.ppo.collector"
SYSTEM = "Write the whole function, with its signature, in one fenced block of Python."
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    f"{COLLECTOR}.env.type=code",
    f"{COLLECTOR}.env.code.sandbox.timeout_s=15",
    f"{COLLECTOR}.env.code.sandbox.memory_mb=512",
    f"{COLLECTOR}.agent.math_code_single_step.system_prompt='{SYSTEM}'",
    # groups in which all programs do the same say nothing: others take their place
    "trainer.ppo.filter_zero_variance=true",
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    f"{COLLECTOR}.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
]


def laptop() -> list[str]:
    return [
        *lesson("code"),
        f"{COLLECTOR}.agent.math_code_single_step.system_prompt=null",
        "trainer.ppo.eval.sampling.max_new_tokens=12",
    ]


if __name__ == "__main__":
    train(OPTIONS, laptop)
