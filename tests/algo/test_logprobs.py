"""Compare chunked logprobs and entropies with plain autograd: values, gradients and memory."""

from __future__ import annotations

import pytest
import torch

from arealite.algo.logprobs import (
    NO_LOGPROB,
    LogitChange,
    OutputHead,
    kept_set_logprobs,
    token_logprobs,
)


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


def several_ids(n: int, m: int, v: int) -> torch.Tensor:
    """Draw ids [N, M]; one in four is -1, and some tokens have an id twice."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, v, (n, m), generator=generator)
    ids[torch.rand(n, m, generator=generator) < 0.25] = -1
    ids[::3, 1] = ids[::3, 0]
    return ids


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("change", [(1.0, 0.0), (0.25, 1.5)])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_logprobs_of_several_ids_match_autograd(
    chunk: int, change: tuple[float, float], has_entropy: bool
) -> None:
    n, m, v = 33, 5, 50
    hidden, weight, _, temperature = inputs(n, 16, v)
    ids = several_ids(n, m, v)
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(n, m, generator=generator)
    entropy_mix = torch.randn(n, generator=generator) * has_entropy
    head = OutputHead(weight, None, LogitChange(*change))
    logprobs, entropy = token_logprobs(hidden, head, ids, temperature_N=temperature, chunk=chunk)
    ours = (mix * logprobs).sum()
    if has_entropy:
        ours = ours + (entropy_mix * entropy).sum()
    scale, cap = change
    logits = scale * (hidden.double() @ weight.double().T)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logp = torch.log_softmax(logits / temperature[:, None], -1)
    chosen = logp.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, NO_LOGPROB)
    plain_entropy = -(logp.exp() * logp).sum(-1)
    theirs = (mix * chosen).sum() + (entropy_mix * plain_entropy).sum()
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(ours, [hidden, weight])
    expected = torch.autograd.grad(theirs, [hidden, weight])
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_first_column_of_several_ids_equals_a_call_with_one_bit_for_bit() -> None:
    hidden, weight, targets, temperature = inputs(33, 16, 50)
    head = OutputHead(weight)
    options = {"temperature_N": temperature, "chunk": 7}
    one, one_entropy = token_logprobs(hidden, head, targets, **options)
    ids = torch.cat([targets[:, None], several_ids(33, 5, 50)], 1)
    several, several_entropy = token_logprobs(hidden, head, ids, **options)
    assert torch.equal(one, several[:, 0])
    assert torch.equal(one_entropy, several_entropy)
    gradients = torch.autograd.grad(one.sum(), [hidden, weight])
    masked = several[:, 0].sum() + 0.0 * several[:, 1:].sum()
    for got, wanted in zip(torch.autograd.grad(masked, [hidden, weight]), gradients, strict=True):
        assert torch.equal(got, wanted)


def test_missing_id_has_no_gradient_even_if_its_own_is_not_finite() -> None:
    hidden, weight, targets, temperature = inputs(4, 8, 10)
    ids = torch.stack([targets, torch.full_like(targets, -1)], 1)
    logprobs, _ = token_logprobs(
        hidden, OutputHead(weight), ids, temperature_N=temperature, chunk=2
    )
    assert (logprobs[:, 1] == NO_LOGPROB).all()
    assert logprobs[:, 1].exp().sum() == 0.0
    poison = torch.tensor([1.0, float("nan")]).expand(4, 2)
    [gradient] = torch.autograd.grad(logprobs, [hidden], poison, retain_graph=True)
    [expected] = torch.autograd.grad(logprobs[:, 0].sum(), [hidden])
    assert torch.equal(gradient, expected)


def test_kept_set_logprobs_are_those_of_the_truncated_policy() -> None:
    """Row 0 keeps ids 1, 4 and 2; row 1 is not truncated; values and gradients by autograd."""
    logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    logp = torch.log_softmax(logits, -1)
    ids = torch.tensor([[4, 1, 4, 2, -1], [3, 3, 0, 5, 1]])
    chosen = logp.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, NO_LOGPROB)
    ours = kept_set_logprobs(chosen, torch.tensor([True, False]))
    kept = torch.log_softmax(logits[0, [1, 2, 4]], -1)
    torch.testing.assert_close(ours[0, :4], kept[[2, 0, 2, 1]])
    torch.testing.assert_close(ours[1], logp[1, ids[1]])
    assert ours[0, 4].exp() == 0.0
    torch.testing.assert_close(ours[0, 1:].exp().sum(), torch.ones((), dtype=torch.float64))
    [gradient] = torch.autograd.grad(ours[0, 0], logits, retain_graph=True)
    [expected] = torch.autograd.grad(kept[2], logits)
    torch.testing.assert_close(gradient, expected)


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
