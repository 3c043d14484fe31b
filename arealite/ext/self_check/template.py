"""Checks a chat template against the tokenizer, the stop tokens, and the parser of tool calls."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from arealite.api.agent import agents, load_tokenizer
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.errors import UserError, one_line
from arealite.base.model_folder import eos_tokens
from arealite.ext.agents.tool_use import ToolUseAgent, format_of
from arealite.ext.agents.turn_tokens import common_prefix_length
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.parser import read_calls
from arealite.ext.gateway.rendering import Renderer
from arealite.ext.gateway.request_data import ApiError, function_call
from arealite.ext.offline.answers import USER, marker_id, turn_end
from arealite.ext.prompts.prompt_checks import check_rendering, has_chat_template, uses_template
from arealite.system.data.tasks import FIRST_ROWS

ARGUMENTS = {"query": "a b", "count": 3}


def check_run(config: ExperimentConfig, facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield the faults of a run's chat template, and of the prompts that go through it.

    It is a hook `check`. A template that renders no prompt at all is an error of the former.
    """
    if config.trainer.is_offline:
        return
    tasks = [*facts.train_tasks, *facts.eval_tasks]
    if not uses_template(config, tasks):
        return
    tokenizer = load_tokenizer(config.model.path)
    for fault in check_template(config, tokenizer):
        yield "template", fault
    first_tasks = [*facts.train_tasks[:FIRST_ROWS], *facts.eval_tasks[:FIRST_ROWS]]
    for warning in check_rendering(config, first_tasks, tokenizer):
        yield "template", warning


def check_template(config: ExperimentConfig, tokenizer: Any = None) -> list[str]:
    """Return the faults of a run's chat template.

    Args:
        config: The experiment.
        tokenizer: The model's tokenizer; None: it is loaded.

    Raises:
        UserError: See template_faults.
    """
    collector = config.trainer.ppo.collector
    path = config.model.path
    if not has_chat_template(path):
        return []
    tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
    sampling = collector.sampling
    stop_ids = {
        *eos_tokens(path),
        *sampling.stop_token_ids,
        *tokenizer.convert_tokens_to_ids([*sampling.stop]),
        tokenizer.eos_token_id,
    }
    formats = [
        agents.options(agent_config).format
        for agent_config in collector.agents
        if issubclass(agents.get(agent_config.type), ToolUseAgent)
    ]
    family = format_of(tokenizer, formats[0]).name if formats else "auto"
    faults = template_faults(tokenizer, stop_ids, format=family, has_tools=bool(formats))
    if "auto" in formats and family_of(tokenizer).name == "text":
        faults.append(
            "the chat template has no known format of tool calls, so Hermes calls are read; "
            "to choose one, set agent.tool_use.format"
        )
    return faults


def template_faults(
    tokenizer: Any,
    stops: Collection[int],
    *,
    format: str = "auto",
    has_tools: bool = True,
) -> list[str]:
    """Return the faults of a chat template, one sentence for each; [] if none is found.

    Args:
        tokenizer: Has a chat template.
        stops: Ids of the tokens that end a generation.
        format: The family whose tool calls the run parses.
        has_tools: Whether tool calls are checked, too.

    Raises:
        UserError: The template refuses a prompt of one text, or the tokenizer splits the marker
            that ends a turn, so that no generation ends there.
    """
    renderer = Renderer(tokenizer, family_of(tokenizer, format))
    faults = list[str]()
    try:
        renderer.render([USER], ())
    except ApiError as error:
        reason, _, _ = one_line(error).partition(". Remove")
        raise UserError(
            f"model.path: no prompt can be rendered: {reason}. "
            "Correct the chat template beside the tokenizer."
        ) from error
    try:
        marker = turn_end(tokenizer).marker
    except UserError as error:
        return [f"the chat template refuses a short conversation: {error}"]
    if marker and not renderer.family.has_channels:  # there, thoughts end with the marker, too
        try:
            token = marker_id(tokenizer, marker)
        except UserError as error:
            raise UserError(f"model.path: {error}") from error
        if token not in stops:
            faults.append(
                f"the chat template ends a turn with {marker}, which is no stop token; "
                f"set trainer.ppo.collector.sampling.stop_token_ids=[{token}]"
            )
    try:
        if has_tools:
            faults += _faults_of_calls(renderer)
    except ApiError as error:
        faults.append(f"the chat template refuses a short conversation: {error}")
    return faults


def _faults_of_calls(renderer: Renderer) -> list[str]:
    """Return the fault if the template renders no tools, or calls that the parser does not read."""
    schema: Any = {
        "type": "object",
        "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
        "required": [],
    }
    function = {"name": "search", "description": "d", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    prompt = renderer.render([USER], tools)
    if prompt == renderer.render([USER], ()):
        return [
            "the chat template renders no tools, so the model does not see them; "
            "describe them in agent.tool_use.system_prompt, or use another template"
        ]
    sampled_id = "functions.search:0"
    is_id_of_family = re.fullmatch(renderer.family.sampled_id or "(?!)", sampled_id)
    call = function_call(sampled_id if is_id_of_family else "c00010000", "search", ARGUMENTS)
    answer = {"role": "assistant", "tool_calls": [call]}
    conversation = renderer.render([USER, renderer.prepare(answer)], tools, is_prompt=False)
    rendered_call = conversation[common_prefix_length(prompt, conversation) :]
    _, calls = read_calls(rendered_call, renderer.family, tools)
    if [(call.name, call.arguments) for call in calls] == [("search", ARGUMENTS)]:
        return []
    return [
        f"the chat template writes a call as {rendered_call[:80]!r}, "
        f"which the format {renderer.family.name} does not read; "
        "use the format of the model (agent.tool_use.format, gateway.parser)"
    ]
