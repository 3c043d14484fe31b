"""Compare chunked logprobs and entropies with plain autograd: values, gradients and memory."""

from __future__ import annotations

import pytest
import torch

from arealite.algo.logprobs import LogitChange, OutputHead, token_logprobs


def inputs(n: int, h: int, v: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator).requires_grad_()
    weight = torch.randn(v, h, generator=generator).mul_(0.3).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=generator)
    temperature = torch.rand(n, generator=generator) + 0.5
    return hidden, weight, targets, temperature


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax((hidden @ weight.T).float() / temperature[:, None], dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_chunked_logprobs_and_gradients_match_autograd(chunk: int, which: str) -> None:
    hidden, weight, targets, temperature = inputs(33, 16, 50)
    mix = torch.randn(2, 33, generator=torch.Generator().manual_seed(1))

    def total(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logprobs, entropy = outputs
        parts = {"logprobs": (mix[0] * logprobs).sum(), "entropy": (mix[1] * entropy).sum()}
        return sum(parts.values()) if which == "both" else parts[which]  # type: ignore[return-value]

    ours = token_logprobs(
        hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=chunk
    )
    theirs = naive(hidden, weight, targets, temperature)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(total(ours), [hidden, weight])
    for got, expected in zip(
        grads, torch.autograd.grad(total(theirs), [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("change", [(1.0, 0.0), (0.25, 0.0), (1.0, 1.5), (-3.0, 2.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_changed_logits_and_bias_have_exact_gradients(
    change: tuple[float, float], has_bias: bool
) -> None:
    hidden, weight, targets, temperature = (each.detach() for each in inputs(33, 16, 50))
    generator = torch.Generator().manual_seed(1)
    given = [
        hidden.double(),
        weight.double(),
        torch.randn(50, generator=generator).double() if has_bias else None,
    ]
    scale, cap = change

    def outputs(*given: torch.Tensor | None) -> torch.Tensor:
        head = OutputHead(given[1], given[2], LogitChange(*change))  # type: ignore[arg-type]
        logprobs, entropy = token_logprobs(
            given[0],
            head,
            targets,
            temperature_N=temperature,
            chunk=7,  # type: ignore[arg-type]
        )
        return torch.stack([logprobs, entropy])

    def plain(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        logits = scale * torch.nn.functional.linear(hidden, weight, bias)
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logp = torch.log_softmax(logits / temperature[:, None], -1)
        return torch.stack([logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])

    mix, found = torch.randn(2, 33, generator=generator), []
    for function, dtype in ((outputs, torch.float32), (plain, torch.float64)):
        leaves = [each if each is None else each.to(dtype).requires_grad_() for each in given]
        result = function(*leaves)  # type: ignore[arg-type]
        wanted = [leaf for leaf in leaves if leaf is not None]
        found.append([result, *torch.autograd.grad((mix * result).sum(), wanted)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_bf16_inputs_give_close_float32_results() -> None:
    hidden, weight, targets, temperature = inputs(20, 16, 50)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    ours = token_logprobs(low[0], OutputHead(low[1]), targets, temperature_N=temperature, chunk=6)
    theirs = naive(low[0].float(), low[1].float(), targets, temperature)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.02, atol=0.03)
    ours[0].sum().backward()
    assert low[0].grad is not None
    assert low[0].grad.dtype == torch.bfloat16


def test_float32_hidden_states_before_a_bf16_head_are_rounded_to_it() -> None:
    hidden, weight, targets, temperature = inputs(20, 16, 50)
    head = OutputHead(weight.detach().bfloat16())
    options = {"temperature_N": temperature, "chunk": 6}
    ours = token_logprobs(hidden, head, targets, **options)
    rounded = token_logprobs(hidden.detach().bfloat16(), head, targets, **options)
    torch.testing.assert_close(ours, rounded, rtol=0, atol=0)
    ours[0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_logprobs_of_no_tokens_have_zero_gradient() -> None:
    hidden, weight, targets, temperature = inputs(0, 16, 50)
    logprobs, entropy = token_logprobs(
        hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=4
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) == 0.0


def test_no_saved_tensor_is_larger_than_a_chunk_of_logits() -> None:
    n, v, chunk = 64, 5000, 8
    hidden, weight, targets, temperature = inputs(n, 4, v)
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = token_logprobs(
            hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=chunk
        )
    assert max(saved) <= weight.numel()
    assert sum(saved) < weight.numel() + hidden.numel() + 4 * n
    with LargestOutput() as largest:
        again = token_logprobs(
            hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=chunk
        )
        (again[0].sum() + again[1].sum()).backward()
    assert largest.numel <= chunk * v < n * v
    del outputs


class LargestOutput(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_frozen_head_still_gives_hidden_gradients() -> None:
    hidden, weight, targets, temperature = inputs(20, 16, 50)
    expected = token_logprobs(
        hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=6
    )
    (wanted,) = torch.autograd.grad(expected[0].sum(), [hidden])
    frozen = weight.detach()
    got = token_logprobs(hidden, OutputHead(frozen), targets, temperature_N=temperature, chunk=6)
    got[0].sum().backward()
    torch.testing.assert_close(hidden.grad, wanted)
