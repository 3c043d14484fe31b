"""Programs as answers: each runs in a sandbox; the reward is the share of passed test cases.

    python3 examples/code_sandbox.py model.path=/models/Qwen2.5-Coder-1.5B-Instruct \\
        dataset.train=mbpp.jsonl

Rows have the format of MBPP, HumanEval or your own cases (docs/environments.md). Without
dataset.train, the tasks are generated functions of one line. The example needs bubblewrap. On a
laptop, a tiny model writes such functions (tools/lessons/code.py):

    python3 examples/code_sandbox.py

Watch reward/parts/solved, /passed and /loaded: the share of programs that pass all cases, the share
of passed cases, and the share of programs that load.
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
    # groups with equal rewards have no gradient: other groups replace them
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
