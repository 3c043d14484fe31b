r"""GRPO on mathematics, as in DeepSeekMath (arXiv 2402.03300), but asynchronous.

    python3 examples/grpo_math.py model.path=/models/Qwen2.5-1.5B-Instruct dataset.train=gsm8k.jsonl

A row has `prompt` and `ground_truth`. Without dataset.train, questions of five levels are
generated. An answer in \boxed{} that equals the ground truth has reward 1. On a laptop, a tiny
model sorts digits:

    python3 examples/grpo_math.py

Watch reward/mean, eval/reward, and staleness/max, which never exceeds max_staleness. Presets of
other algorithms are in config/algo/. DAPO needs two files: --config config/async_ppo.yaml --config
config/algo/dapo.yaml.
"""

from _run import ONE_GPU, sorting, train

AGENT = "trainer.ppo.collector.agent.math_code_single_step"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    f"{AGENT}.system_prompt='Reason step by step, and put your final answer into \\boxed{{}}.'",
    # the algorithm: compares the 8 answers to a question; see config/algo/grpo.yaml
    "trainer.ppo.collector.group_size=8",
    "trainer.ppo.advantage.type=grpo",
    "trainer.ppo.loss.reduction=seq_mean_token_mean",
    "trainer.ppo.kl.coef=0.04",
    "trainer.ppo.kl.reference=initial",
    # the run: 64 questions per step, sampled by a policy at most two versions old
    "trainer.ppo.max_staleness=2",
    "trainer.ppo.batch_size=512",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.every_steps=20",
]


def laptop() -> list[str]:
    return [*sorting(), f"{AGENT}.system_prompt=null"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
