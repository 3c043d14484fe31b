"""Continues conversations of GPT-OSS, whose chat template refuses the answers that it sampled."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from arealite.api.observation import ChatMessage
from arealite.base.errors import UserError
from arealite.ext.agents.turn_tokens import special_text
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.rendering import TOOLS, Renderer
from arealite.ext.gateway.request_data import function_call


def text_after(
    renderer: Renderer, new: Sequence[ChatMessage], *, has_tools: bool, last_id: int
) -> str:
    """Render new messages after a short answer, which takes the place of the sampled one."""
    results = [message for message in new if message["role"] == "tool"]
    calls = [
        function_call(result.get("tool_call_id"), result.get("name"), {}) for result in results
    ]
    answer = {"role": "assistant", "content": "" if calls else "c", "tool_calls": calls}
    kinds = TOOLS if has_tools else 0
    prepared = [renderer.prepare(message) for message in new]
    rendered = renderer.render_after(kinds, answer, prepared)
    if rendered is None:
        raise UserError("the model's chat template refuses the messages after an answer")
    sampled_stop = special_text(renderer.tokenizer, last_id)
    end_of_turn = renderer.ending(kinds, answer).turn
    return renderer.remaining(rendered, sampled_stop, end_of_turn)


def text_after_answer(tokenizer: Any) -> partial[str] | None:
    """Return what continues conversations, if the template writes answers into channels."""
    family = family_of(tokenizer)
    return partial(text_after, Renderer(tokenizer, family)) if family.has_channels else None
