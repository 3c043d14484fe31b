"""The part of SGLang's HTTP API that describes limits and load."""

from collections.abc import Mapping

import msgspec

from arealite.base.errors import UserError


class LoadOfCopy(msgspec.Struct, kw_only=True):
    """Requests of one copy of the model."""

    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    """0: unknown."""


class ModelLimit(msgspec.Struct, kw_only=True):
    """The context of a model of a server."""

    max_model_len: int | None = None


def context_length(server_info: Mapping[str, object], models: Mapping[str, object]) -> int | None:
    """Return the tokens of the longest prompt; None if the server does not report it.

    After an abort, prompt and partial answer are sent as a new prompt, so the limit of prompts
    counts. It is less than the model's, because SGLang reserves some tokens.

    Args:
        server_info: JSON of /server_info.
        models: JSON of /v1/models.

    Raises:
        UserError: an answer has another form.
    """
    try:
        limits = msgspec.convert(models.get("data", []), list[ModelLimit])
        lengths = [limit.max_model_len for limit in limits[:1]]
        lengths.append(msgspec.convert(server_info.get("max_req_input_len"), int | None))
    except msgspec.ValidationError as error:
        raise UserError(
            f"its /v1/models or /server_info has not the form of SGLang's: {error}. "
            "Correct the address, or take a tested version of SGLang."
        ) from error
    return min(filter(None, lengths), default=None)


def total_load(answer: Mapping[str, object]) -> dict[str, int] | None:
    """Return the running and waiting requests of all copies of the model, and the capacity.

    Args:
        answer: JSON of /v1/loads.

    Returns:
        The load as the content of a server's name has it; None if the answer has no valid one.
    """
    try:
        loads = msgspec.convert(answer.get("loads"), list[LoadOfCopy])
    except msgspec.ValidationError:
        return None
    return {
        "running": sum(load.num_running_reqs for load in loads),
        "waiting": sum(load.num_waiting_reqs for load in loads),
        "capacity": sum(load.max_running_requests for load in loads),
    }
