"""Saves a trained state, or continues one; prints its path and log-probabilities, as JSON.

python save_or_continue.py BASE_MODEL [PATH]
"""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7]),
    loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)
STEP = types.AdamParams(learning_rate=1e-2)


def main() -> None:
    """Train one step, save, and train one more; or only the last."""
    service = tinker.ServiceClient()
    path = sys.argv[2] if len(sys.argv) > 2 else ""
    if path:
        training = service.create_training_client_from_state_with_optimizer(path).result()
    else:
        training = service.create_lora_training_client(sys.argv[1], rank=4, seed=2).result()
        training.forward_backward([DATUM], "cross_entropy").result()
        training.optim_step(STEP).result()
        path = training.save_state("kept").result().path
    training.forward_backward([DATUM], "cross_entropy").result()
    training.optim_step(STEP).result()
    result = training.forward([DATUM], "cross_entropy").result()
    logprobs = list(result.loss_fn_outputs[0]["logprobs"].data)
    print(json.dumps({"path": path, "logprobs": logprobs}), flush=True)


if __name__ == "__main__":
    main()
