"""A small reinforcement-learning loop through the SDK; prints what each step saw, as JSON.

Requests are sent one after the other, so that the order of additions is always the same.
"""

from __future__ import annotations

import json
import sys

import tinker
from plan import (
    ADAM,
    LR,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_TOKENS,
    PROMPTS,
    RANK,
    SEED,
    reward_of,
    seed_of,
)
from tinker import types


def main() -> None:
    """Train."""
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(sys.argv[1], rank=RANK, seed=SEED).result()
    first = training.save_weights_for_sampler("first").result().path
    steps = []
    for step in range(NUM_STEPS):
        sampler = training.save_weights_and_get_sampling_client().result()
        data, answers = [], []
        for number, prompt in enumerate(PROMPTS):
            group = []
            for member in range(NUM_SAMPLES):
                params = types.SamplingParams(
                    max_tokens=NUM_TOKENS, seed=seed_of(step, number, member)
                )
                result = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
                group.append(result.sequences[0])
            rewards = [reward_of(sequence.tokens) for sequence in group]
            mean = sum(rewards) / len(rewards)
            for sequence, reward in zip(group, rewards, strict=True):
                tokens = [*prompt, *sequence.tokens]
                num_prompt = len(prompt) - 1
                advantages = [0.0] * num_prompt + [reward - mean] * len(sequence.tokens)
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(tokens[:-1]),
                        loss_fn_inputs={
                            "target_tokens": tokens[1:],
                            "logprobs": [0.0] * num_prompt + list(sequence.logprobs),
                            "advantages": advantages,
                        },
                    )
                )
                answers.append(
                    {
                        "tokens": tokens,
                        "num_prompt": len(prompt),
                        "logprobs": list(sequence.logprobs),
                        "reward": reward,
                    }
                )
        passed = training.forward_backward(data, "importance_sampling").result()
        training.optim_step(types.AdamParams(learning_rate=LR, **ADAM)).result()
        steps.append(
            {
                "answers": answers,
                "loss": passed.metrics["loss:sum"],
                "logprobs": [list(out["logprobs"].data) for out in passed.loss_fn_outputs],
            }
        )
    print(json.dumps({"first": first, "steps": steps}))


if __name__ == "__main__":
    main()
