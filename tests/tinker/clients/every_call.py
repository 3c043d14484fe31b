"""Calls everything of the SDK that the service has; prints what was seen, as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import tinker
import torch
from tinker import types

BASE = "org/tiny"


def datum(tokens: list[int], targets: Any = None, **inputs: Any) -> types.Datum:
    """Return a datum; the targets are the next tokens, if none are passed."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1] if targets is None else tokens),
        loss_fn_inputs={"target_tokens": tokens[1:] if targets is None else targets, **inputs},
    )


def refusal(call: Any) -> str:
    """Return the error of a call that must fail."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "no error"


def main() -> None:
    """Make the calls in the order of a training run."""
    seen: dict[str, Any] = {}
    service = tinker.ServiceClient()
    rest = tinker.RestClient()
    models = rest.get_server_capabilities().result().supported_models
    seen["models"] = [model.model_name for model in models]

    training = service.create_lora_training_client(BASE, rank=4, seed=1).result()
    seen["rank"] = training.get_info().lora_rank
    tokens = [5, 6, 7, 8, 9]
    weighted = datum(tokens, weights=[0.0, 1.0, 1.0, 1.0])
    before = training.forward([weighted], "cross_entropy").result()
    losses = list[float]()
    for _ in range(8):
        passed = training.forward_backward([weighted], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)).result()
        losses.append(passed.result().metrics["loss:sum"])
    seen["losses"] = losses
    seen["forward"] = before.metrics["loss:sum"]
    logprobs = torch.tensor(before.loss_fn_outputs[0]["logprobs"].data)
    seen["sum of logprobs"] = float((logprobs[1:]).sum())

    sampler_logprobs, advantages = [-3.0] * 4, [0.0, 1.0, 1.0, -1.0]
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        policy = datum(tokens, logprobs=sampler_logprobs, advantages=advantages)
        result = training.forward_backward([policy], loss).result()
        seen[loss] = result.metrics["loss:sum"]
    policy = datum(
        tokens,
        logprobs=sampler_logprobs,
        advantages=advantages,
        sequence_ratio_mask=[0.0, 1.0, 1.0, 1.0],
    )
    result = training.forward_backward([policy], "gspo").result()
    seen["gspo"] = result.metrics["loss:sum"]
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()

    several = datum([5, 6], torch.tensor([[6, 1], [7, 2]]), weights=torch.full((2, 2), 0.5))
    result = training.forward([several], "cross_entropy").result()
    seen["shape of two targets"] = result.loss_fn_outputs[0]["logprobs"].shape

    def own_loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = sum((values.square().sum() for values in logprobs), torch.zeros(()))
        return loss, {"squares:sum": loss.detach().item()}

    own = training.forward_backward_custom([weighted], own_loss).result()
    seen["own loss"] = sorted(own.metrics)
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()

    state = training.save_state("state").result().path
    weights = training.save_weights_for_sampler("weights").result().path
    seen["paths"] = [state.rpartition(":")[2], weights.rpartition(":")[2]]
    listed = rest.list_user_checkpoints().result().checkpoints
    seen["checkpoints"] = sorted(checkpoint.checkpoint_id for checkpoint in listed)

    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=6, seed=3)
    snapshot = training.save_weights_and_get_sampling_client().result()
    named = service.create_sampling_client(model_path=weights).result()
    base = service.create_sampling_client(base_model=BASE).result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    samples = {
        name: [sequence.tokens for sequence in client.sample(prompt, 2, params).result().sequences]
        for name, client in [("snapshot", snapshot), ("named", named), ("inflight", inflight)]
    }
    seen["samples are equal"] = samples["snapshot"] == samples["named"] == samples["inflight"]
    targets = torch.full((len(tokens) - 1, 2), -1)
    targets[:, 1] = torch.tensor(tokens[1:])
    scored = snapshot.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=tinker.TensorData.from_torch_sparse(targets, pad_value=-1),
    ).result()
    trained = training.forward([weighted], "cross_entropy").result()
    trained_logprobs = trained.loss_fn_outputs[0]["logprobs"].data
    seen["served minus trained"] = max(
        abs(served - own)
        for served, own in zip(scored.prompt_logprobs[1:], trained_logprobs, strict=True)
    )
    seen["named tokens minus the prompt's"] = max(
        abs(row[1] - own)
        for row, own in zip(
            scored.target_prompt_logprobs.to_torch().tolist(),
            scored.prompt_logprobs[1:],
            strict=True,
        )
    )
    seen["first prompt logprob"] = scored.prompt_logprobs[0]
    seen["top of the prompt"] = [len(row) if row else None for row in scored.topk_prompt_logprobs]
    sequence = scored.sequences[0]
    seen["top of a sample"] = all(
        math.isclose(dict(row).get(token, own), own, abs_tol=1e-6)
        for row, token, own in zip(
            sequence.topk_logprobs, sequence.tokens, sequence.logprobs, strict=True
        )
    )
    base_logprobs = base.compute_logprobs(prompt).result()
    seen["base is untrained"] = sum(base_logprobs[2:]) < sum(scored.prompt_logprobs[2:]) - 1

    again = service.create_training_client_from_state_with_optimizer(state).result()
    fresh = service.create_training_client_from_state(state).result()
    step = types.AdamParams(learning_rate=1e-3)
    continued = list[list[float]]()
    for client in (training, again, fresh):
        client.forward_backward([weighted], "cross_entropy").result()
        client.optim_step(step).result()
        result = client.forward([weighted], "cross_entropy").result()
        continued.append(list(result.loss_fn_outputs[0]["logprobs"].data))
    seen["continued exactly"] = continued[0] == continued[1]
    seen["fresh optimizer differs"] = continued[0] != continued[2]

    seen["refusals"] = [
        refusal(lambda: training.forward_backward([weighted], "stable_reinforce").result()),
        refusal(lambda: service.create_lora_training_client("org/other").result()),
        refusal(lambda: service.create_sampling_client(model_path=f"{weights}x").result()),
        refusal(lambda: base.sample(prompt, 1, types.SamplingParams(stop=[])).result()),
    ]
    service.close("success").result()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
