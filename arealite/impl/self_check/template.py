"""Checks a chat template against the tokenizer, the stop tokens, and the parser of tool calls."""

import re
from collections.abc import Collection
from typing import Any

from arealite.api.agent import agents, load_tokenizer
from arealite.api.config import ExperimentConfig
from arealite.base.errors import UserError, one_line
from arealite.base.model_folder import eos_tokens, has_chat_template
from arealite.impl.agent.tool_use import ToolUseAgent, format_of
from arealite.impl.gateway.exchange import ApiError, function_call
from arealite.impl.gateway.families import family_of
from arealite.impl.gateway.parser import read_calls
from arealite.impl.gateway.rendering import Renderer
from arealite.system.data.answers import USER, marker_id, turn_end
from arealite.system.data.templates import common_prefix_length

ARGUMENTS = {"query": "a b", "count": 3}


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
    words = tokenizer.convert_tokens_to_ids([*sampling.stop])
    stops = {*eos_tokens(path), *sampling.stop_token_ids, *words, tokenizer.eos_token_id}
    users = [each for each in collector.agents if issubclass(agents.get(each.type), ToolUseAgent)]
    names = [agents.options(each).format for each in users]
    family = format_of(tokenizer, names[0]).name if names else "auto"
    faults = template_faults(tokenizer, stops, format=family, has_tools=bool(names))
    if "auto" in names and family_of(tokenizer).name == "text":
        what = "the chat template has no known format of tool calls, so Hermes calls are read"
        faults.append(f"{what}; to choose one, set agent.tool_use.format")
    return faults


def template_faults(
    tokenizer: Any, stops: Collection[int], *, format: str = "auto", has_tools: bool = True
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
        what = f"model.path: no prompt can be rendered: {one_line(error).partition('. Remove')[0]}"
        raise UserError(f"{what}. Correct the chat template beside the tokenizer.") from error
    try:
        marker = turn_end(tokenizer).marker
    except UserError as error:
        return [f"the chat template refuses a short conversation: {error}"]
    if marker and not renderer.family.has_channels:  # there, thoughts end with the marker, too
        try:
            token = marker_id(tokenizer, marker)
        except UserError as error:
            raise UserError(f"model.path: {error}") from error
        fix = f"set trainer.ppo.collector.sampling.stop_token_ids=[{token}]"
        fault = f"the chat template ends a turn with {marker}, which is no stop token; {fix}"
        faults += [fault] * (token not in stops)
    try:
        if has_tools:
            faults += _faults_of_calls(renderer)
    except ApiError as error:
        faults.append(f"the chat template refuses a short conversation: {error}")
    return faults


def _faults_of_calls(renderer: Renderer) -> list[str]:
    """Return the fault if the template renders no tools, or calls that the parser does not read."""
    kinds = {"query": {"type": "string"}, "count": {"type": "integer"}}
    schema: Any = {"type": "object", "properties": kinds, "required": []}
    tools = [{"type": "function", "function": {"name": "search", "description": "d"}}]
    tools[0]["function"]["parameters"] = schema
    own = "functions.search:0"
    name = own if re.fullmatch(renderer.family.sampled_id or "(?!)", own) else "c00010000"
    call = {"role": "assistant", "tool_calls": [function_call(name, "search", ARGUMENTS)]}
    user: Any = {"role": "user", "content": "q"}
    before = renderer.render([user], tools)
    if before == renderer.render([user], ()):
        fault = "the chat template renders no tools, so the model does not see them"
        return [f"{fault}; describe them in agent.tool_use.system_prompt, or use another template"]
    whole = renderer.render([user, renderer.prepare(call)], tools, is_prompt=False)
    written = whole[common_prefix_length(before, whole) :]
    _, calls = read_calls(written, renderer.family, tools)
    what = f"the chat template writes a call as {written[:80]!r}, which the format"
    fix = "use the format of the model (agent.tool_use.format, gateway.parser)"
    is_read = [(each.name, each.arguments) for each in calls] == [("search", ARGUMENTS)]
    return [] if is_read else [f"{what} {renderer.family.name} does not read; {fix}"]
