"""Prompts that a chat template would not render as they are written are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import Agent, agents
from arealite.api.collector_config import AgentConfig, CollectorConfig, MathCodeSingleStepConfig
from arealite.api.env import EnvConfig, envs
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.ext.agents.chat import ChatAgent
from arealite.ext.agents.config import ChatConfig
from arealite.ext.math.env import MathEnv
from arealite.ext.prompts.prompt_checks import check_rendering, template_line
from tests.fakes.chat_families import tokenizer_of


def ask(*messages: str) -> list[dict[str, str]]:
    """Return chat messages, each written as "role: content"."""
    parts = [message.partition(": ") for message in messages]
    return [{"role": role, "content": content} for role, _, content in parts]


def experiment(agent: str = "math_code_single_step", env: str = "math", **options: Any) -> Any:
    """Return a config with one environment, and one agent with these options."""
    kind = ChatConfig if agent == "chat" else MathCodeSingleStepConfig
    own: Any = {agent: kind(**options)} if options else {}
    collector = CollectorConfig(env=EnvConfig(type=env), agent=AgentConfig(type=agent, **own))
    return ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(collector=collector)))


def check(family: str, *rows: Any, config: Any = None) -> list[str]:
    """Check prompts with the template of a family."""
    tasks: Sequence[Task] = [
        Task(task_id=f"train-{i}", prompt=row, ground_truth=None, extra_info={})
        for i, row in enumerate(rows)
    ]
    return check_rendering(config or experiment(), tasks, tokenizer_of(family))


LATE = ask("user: a", "assistant: b", "system: c", "user: d")
TEMPLATED = ["chat", "math_code_single_step", "reasoning", "tool_use"]
REFUSED: dict[str, tuple[str, Any, str]] = {
    "late system": ("deepseek_v3", LATE, "leaves out message 3 (system) of its prompt"),
    "role": ("qwen3", ask("critic: a", "user: b"), "leaves out message 1 (critic)"),
    "refused": ("mistral", LATE, "template refuses the messages: Only user"),
    "rendered": ("qwen3", "<|im_start|>user\na<|im_end|>\n", "message 1 (user) of its prompt co"),
    "bos": ("llama3_1", " <|begin_of_text|>a", "contains <|begin_of_text|>, so it is"),
    "in a message": ("llama3_1", ask("user: a<|eot_id|>"), "contains <|eot_id|>, so it is"),
    "changed": ("llama3_1", ask("user: a", "assistant:  b"), "changes its beginning ' b'"),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("agent", TEMPLATED)
def test_prompt_that_is_not_rendered_as_written_is_refused(fault: str, agent: str) -> None:
    family, prompt, error = REFUSED[fault]
    with pytest.raises(UserError) as raised:
        check(family, "a", ask("user: a"), prompt, config=experiment(agent))
    assert str(raised.value).startswith("row train-2: ")
    assert error in str(raised.value)


def test_every_beginning_of_an_answer_is_checked() -> None:
    """Conversations of one form are checked once, but a beginning depends on its text."""
    fine = ask("user: a", "assistant: b")
    with pytest.raises(UserError, match="row train-3: the last message is the assistant's"):
        check("llama3_1", fine, fine, fine, ask("user: a", "assistant:  b"))


def test_prompt_that_is_rendered_as_written_is_accepted() -> None:
    rows = [
        ask("system: a", "user: b"),
        ask("developer: a", "user: b"),
        ask("system: ", "user: b"),
        ask("user: a", "assistant: b", "user: c", "assistant: d "),
        "if a<s>b</s> and <think>c</think>",
    ]
    assert check("deepseek_v3", *rows) == []


def test_text_that_is_sent_without_a_template_may_be_rendered() -> None:
    text = "<|im_start|>user\na<|im_end|>\n"
    assert check("qwen3", text, config=experiment(use_chat_template=False)) == []
    templated = experiment(use_chat_template=False, system_prompt="think")
    with pytest.raises(UserError, match=r"message 1 \(user\) .* contains <\|im_end\|>"):
        check("qwen3", text, config=templated)


@pytest.mark.parametrize("agent", ["math_code_single_step", "chat"])
def test_system_prompt_of_an_agent_is_checked_with_each_row(agent: str) -> None:
    config = experiment(agent, system_prompt="think")
    assert check("deepseek_v3", "a", ask("user: b"), config=config) == []
    with pytest.raises(UserError, match=r"row train-0: .* leaves out message 1 \(system\)"):
        check("deepseek_v3", ask("system: a", "user: b"), config=config)


def test_key_that_the_template_does_not_render_is_reported_once() -> None:
    (message,) = ask("user: b")
    rows = ["a", [message | {"name": "Ann"}], [message | {"name": "Bob", "weight": 1}]]
    assert check("qwen3", *rows) == [
        "the chat template does not render `name` of a message, as in row train-1",
        "the chat template does not render `weight` of a message, as in row train-2",
    ]


def test_environment_with_its_own_prompts_is_not_checked() -> None:
    assert check("deepseek_v3", LATE, config=experiment(env="debate")) == []


def test_system_prompt_of_an_agent_that_is_rendered_is_message_0() -> None:
    config = experiment(system_prompt="<|im_start|>")
    with pytest.raises(UserError, match=r"message 0 \(system\) of its prompt contains"):
        check("qwen3", "a", config=config)


def test_derived_environment_uses_prompts_as_its_base_does() -> None:
    envs.register("derived_math")(type("DerivedMath", (MathEnv,), {}))
    with pytest.raises(UserError, match=r"leaves out message 3 \(system\)"):
        check("deepseek_v3", LATE, config=experiment(env="derived_math"))


def test_derived_agent_may_change_a_prompt_so_it_is_not_checked() -> None:
    agents.register("derived_chat")(type("DerivedChat", (ChatAgent,), {}))
    assert check("deepseek_v3", LATE, config=experiment("derived_chat")) == []


@dataclass(frozen=True, kw_only=True)
class TerseConfig:
    """Options of an agent of another package, which has no system prompt."""

    use_chat_template: bool | None = None


def terse_agent() -> ExperimentConfig:
    """Return a config whose agent is of another package and has the options TerseConfig."""

    class TerseAgent(Agent):
        templates_observation = True

    agents.register("terse", config=TerseConfig)(TerseAgent)
    options_of: Any = config_tree.extend(AgentConfig, {"agent": {"terse": TerseConfig}})
    collector = CollectorConfig(agent=options_of(type="terse"))
    return ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(collector=collector)))


def test_agent_of_another_package_needs_no_option_system_prompt(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    config = terse_agent()
    config = replace(config, model=ModelConfig(path=str(tmp_path)))
    assert check("qwen3", "a", ask("user: b"), config=config) == []
    with pytest.raises(UserError, match=r"message 1 \(user\) .* contains <\|im_end\|>"):
        check("qwen3", "<|im_end|>", config=config)
    tasks = [Task(task_id="train-0", prompt="a", ground_truth=None, extra_info={})]
    assert template_line(config, tasks).startswith("texts go into the model's chat template")
