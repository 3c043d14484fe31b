"""Linear layers by oneDNN give the outputs and gradients of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arealite.algo import logprobs as blocks
from arealite.algo.logprobs import MatrixProducts, products
from arealite.ext.models import fast_linear as linear
from arealite.ext.models.fast_linear import OneDNNProducts

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "USES_ONEDNN", True)


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 16), (1, 1, 16), (0, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_equal_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain, fast = nn.Linear(16, 24, bias=bias), nn.Linear(16, 24, bias=bias)
    fast.load_state_dict(plain.state_dict())
    linear.use_fast_linear(nn.Sequential(fast))
    hidden = torch.randn(shape)
    results = list[list[torch.Tensor | None]]()
    for layer in (plain, fast):
        leaf = hidden.clone().requires_grad_()
        out = layer(leaf)
        (out * torch.linspace(-1, 1, 24)).sum().backward()
        results.append([out.detach(), leaf.grad, *(param.grad for param in layer.parameters())])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_sum_are_right_although_they_are_expanded() -> None:
    layer, hidden = nn.Linear(16, 24, bias=False), torch.randn(5, 16)
    OneDNNProducts().linear(hidden, layer.weight).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, hidden.sum(0).expand(24, 16))


def test_a_frozen_layer_passes_gradients_on() -> None:
    layer = nn.Linear(16, 24).requires_grad_(False)
    linear.use_fast_linear(layer)
    hidden = torch.randn(5, 16, requires_grad=True)
    layer(hidden).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, layer.weight.sum(0).expand(5, 16))
    assert layer.weight.grad is None


def test_new_weights_are_used_at_once() -> None:
    layer, hidden = nn.Linear(16, 24, bias=False), torch.randn(5, 16)
    linear.use_fast_linear(layer)
    with torch.inference_mode():
        before = layer(hidden)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer(hidden), 2 * before)


def test_products_of_transposed_views_equal_those_of_torch() -> None:
    left, right = torch.randn(9, 5).T, torch.randn(9, 7).T
    torch.testing.assert_close(OneDNNProducts().product(left, right), left @ right.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 2)
    left, right, total = torch.randn(9, 5).T, torch.randn(7, 9), torch.ones(5, 7)
    tolerance = {} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    for products_of in (OneDNNProducts(), MatrixProducts()):
        total.fill_(1.0)
        products_of.add_product(total, left.to(dtype), right.to(dtype))
        torch.testing.assert_close(total, left @ right.T + 1, **tolerance)


def test_a_vector_is_computed_by_torch() -> None:
    layer = nn.Linear(16, 24)
    hidden = torch.randn(16)
    expected = layer(hidden)
    linear.use_fast_linear(layer)
    assert torch.equal(layer(hidden), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_by_torch(dtype: torch.dtype) -> None:
    layer, hidden = nn.Linear(16, 24, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    expected = layer(hidden)
    linear.use_fast_linear(layer)
    assert torch.equal(layer(hidden), expected)
    assert torch.equal(OneDNNProducts().product(hidden, layer.weight), hidden @ layer.weight.T)


def test_layers_that_have_a_forward_of_their_own_keep_it() -> None:
    class Doubled(nn.Linear):
        """A layer that computes something else."""

    layer = Doubled(16, 24)
    linear.use_fast_linear(layer)
    assert "forward" not in vars(layer)


def test_without_oneDNN_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "USES_ONEDNN", False)
    layer = nn.Linear(16, 24)
    linear.use_fast_linear(layer)
    assert "forward" not in vars(layer)
    products.cache_clear()
    assert type(products()) is MatrixProducts
    products.cache_clear()
