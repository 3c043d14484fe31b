r"""GRPO on mathematics, as in DeepSeekMath (arXiv 2402.03300), but asynchronous.

    python3 examples/grpo_math.py model.path=/models/Qwen2.5-1.5B-Instruct dataset.train=gsm8k.jsonl

A row has `prompt` and `ground_truth`; without dataset.train, questions of five levels are made. An
answer in \boxed{} that equals the truth has reward 1. On a laptop, where a tiny model sorts digits:

    python3 examples/grpo_math.py

Watch reward/mean and eval/reward, and staleness/max, which stays within max_staleness. Other
algorithms are as short: config/algo/*.yaml; DAPO is --config config/async_ppo.yaml and dapo.yaml.
"""

from _run import ONE_GPU, sorting, train

AGENT = "trainer.ppo.collector.agent.math_code_single_step"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    f"{AGENT}.system_prompt='Reason step by step, and put your final answer into \\boxed{{}}.'",
    # the algorithm: 8 answers a question, compared with each other; see config/algo/grpo.yaml
    "trainer.ppo.collector.group_size=8",
    "trainer.ppo.advantage.type=grpo",
    "trainer.ppo.loss.reduction=seq_mean_token_mean",
    "trainer.ppo.kl.coef=0.04",
    "trainer.ppo.kl.reference=initial",
    # the run: 64 questions a step, sampled by a policy at most two updates old
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
