"""The head in blocks of the vocabulary gives the logits of the whole product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arealite.impl.server.blocked_head import BLOCK, MAX_ROWS, use_blocked_head


class Model:
    """A model that is only its head."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def get_output_embeddings(self) -> Any:
        return self.head


@pytest.mark.parametrize("shape", [(1, 16), (3, 1, 16), (MAX_ROWS + 1, 16)])
def test_logits_equal_those_of_the_whole_product(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 4 * BLOCK + 7, bias=False)
    hidden = torch.randn(shape)
    expected = head(hidden)
    use_blocked_head(Model(head))  # type: ignore[arg-type]
    with torch.inference_mode():
        got = head(hidden)
        head.weight.mul_(2.0)  # a weight update is seen
        twice = head(hidden)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(twice, 2 * expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "head",
    [
        torch.nn.Linear(8, 64, bias=False),
        torch.nn.Linear(8, 4 * BLOCK),
        torch.nn.Linear(8, 4 * BLOCK, bias=False, dtype=torch.bfloat16),
        None,
    ],
    ids=["small", "bias", "bfloat16", "none"],
)
def test_other_heads_stay_as_they_are(head: Any) -> None:
    use_blocked_head(Model(head))  # type: ignore[arg-type]
    assert head is None or "forward" not in vars(head)
