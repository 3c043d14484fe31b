"""A web agent: pages of MiniWoB++ in headless Chromium, as text, with one action per turn.

    python3 examples/browser.py model.path=/models/Qwen2.5-1.5B-Instruct

It needs `pip install -e '.[browser]'` and Debian's chromium-headless-shell. Each worker has one
Chromium, with one context per episode. A context can reach only the page of its task. On a laptop,
a tiny model learns which button to click (tools/lessons/click_test.py):

    python3 examples/browser.py

Watch reward/mean, from -1 to 1, reward/<task>/mean and reward/parts/bad_actions.
"""

from _run import ONE_GPU, lesson, train

COLLECTOR = "trainer.ppo.collector"
ENV = f"{COLLECTOR}.env.browser"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    f"{COLLECTOR}.env.type=browser",
    f"{ENV}.tasks=[click-test,click-button,click-link,click-option,enter-text,login-user]",
    f"{ENV}.max_steps=6",
    f"{ENV}.browser.contexts=16",
    f"{COLLECTOR}.concurrency=16",  # as contexts: an episode that waits for a page may time out
    f"{COLLECTOR}.agent.type=chat",
    "trainer.ppo.batch_size=128",
    "trainer.ppo.total_steps=100",
    "trainer.ppo.lr=1e-6",
    f"{COLLECTOR}.sampling.max_new_tokens=128",
    "trainer.ppo.eval.sampling.max_new_tokens=128",
]


def laptop() -> list[str]:
    return [*lesson("click_test"), f"{COLLECTOR}.agent.type=math_code_single_step"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
