"""An agent that calls tools: a calculator, and Python in a sandbox, over several turns.

    python3 examples/tool_use.py model.path=/models/Qwen2.5-1.5B-Instruct

The chat template lists the tools in the prompt, and shows the format of the model's calls. The
calls of a turn run concurrently; their answers are the next observation. The conversation is one
training sample with a mask over the sampled tokens. On a laptop, a tiny model learns when to call
a calculator (tools/lessons/calculator.py):

    python3 examples/tool_use.py

Watch reward/parts/correct, reward/parts/tool_calls and episode/turns_mean. More tools: search,
files, any MCP server, your own (docs/environments.md).
"""

from _run import ONE_GPU, lesson, train

COLLECTOR = "trainer.ppo.collector"
ENV = f"{COLLECTOR}.env.tools"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",  # or rows with prompt and ground_truth
    "dataset.eval=generated",
    f"{COLLECTOR}.agent.type=tool_use",
    f"{COLLECTOR}.agent.tool_use.max_tokens=4096",
    f"{COLLECTOR}.env.type=tools",
    f"{ENV}.tools=[calculator,python]",
    f"{ENV}.max_turns=6",
    f"{ENV}.weights.efficiency=0.1",  # a right answer with fewer calls gets a higher reward
    f"{ENV}.arithmetic.operands=3",
    f"{ENV}.arithmetic.easy=0.2",
    f"{ENV}.arithmetic.prompt='What is {{}}? Write only the number as your answer.'",
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    f"{COLLECTOR}.sampling.max_new_tokens=512",
    "trainer.ppo.eval.sampling.max_new_tokens=512",
]


def laptop() -> list[str]:
    sums = [f"{ENV}.tools=[calculator]", f"{ENV}.arithmetic.operands=2"]
    return [*lesson("calculator"), *sums, f"{COLLECTOR}.agent.tool_use.max_tokens=64"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
