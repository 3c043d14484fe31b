"""Compare the decode loop with plain forward passes of the same model."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.ext.embedded import decoder as decoder_module
from arealite.ext.embedded.decode_loop import Engine
from arealite.ext.embedded.decoder import MIN_PREFIX_TOKENS, Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.weight_loading import ServedWeights, load_model, stage_weights
from tests.fakes.embedded import Brake
from tests.models import tiny_model
from tests.waiting import until

FAMILIES = {
    "qwen2": {},
    "llama": {"family": "llama"},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
}

WINDOW: dict[str, Any] = {"sliding_window": 8}
MIXED = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
ALIKE = ["full_attention", "sliding_attention"]
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "phi3": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "starcoder2": WINDOW,
    "qwen2": MIXED,
    "qwen3": MIXED | {"head_dim": 8},
    "gemma3_text": WINDOW | {"head_dim": 8, "layer_types": ALIKE},
    "olmo3": WINDOW | {"layer_types": ALIKE},
    "cohere2": WINDOW | {"layer_types": ALIKE},
}
"""Families with a sliding window of 8 tokens, in all layers or in those of `layer_types`."""
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "cohere": {"logit_scale": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": True},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi": {"partial_rotary_factor": 0.5},
}
"""Config options by which model families differ. Prefill and decode must apply each of them."""
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])
    return load_model(str(folder), dtype="float32", device="cpu")[0]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(tmp_path_factory.mktemp("qwen"))
    return load_model(str(folder), dtype="float32", device="cpu")[0]


def make_generation(prompt: list[int], new: int, **sampling: Any) -> Generation:
    stops = sampling.pop("stops", ())
    return Generation(
        rid=f"{prompt}",
        prompt=prompt,
        sampling=SamplingParams(**sampling),
        limit=new,
        stops=frozenset(stops),
    )


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return log-probabilities [T-1, V] of one plain forward pass, in float64 after the logits."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits / temperature, dim=-1)


def check_logprobs(model: Any, generation: Generation, temperature: float = 1.0) -> None:
    whole = generation.prompt + generation.output
    rows = reference_logprobs(model, whole, temperature)[len(generation.prompt) - 1 :]
    expected = rows[torch.arange(len(rows)), generation.output]
    torch.testing.assert_close(
        torch.tensor(generation.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0
    )


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_greedy_equals_transformers_generate(model: Any) -> None:
    wanted = prompts(7)
    generations = [make_generation(prompt, 20, temperature=0.0) for prompt in wanted]
    Decoder(model, max_rows=4, seed=0).run(generations)
    for prompt, generation in zip(wanted, generations, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=20, min_new_tokens=20, eos_token_id=63, pad_token_id=0,
        )  # fmt: skip
        plain = reference_logprobs(model, prompt + generation.output)[len(prompt) - 1 :].argmax(-1)
        assert generation.output == plain.tolist()
        if 63 not in generation.output:
            assert generation.output == expected[0, len(prompt) :].tolist()
        check_logprobs(model, generation)


def check_family(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """Compare requests of 1 to 60 tokens, prompt and answer, with plain forward passes."""
    path = tiny_model(folder, family=family, **settings)
    model = load_model(str(path), dtype="float32", device="cpu")[0]
    (begin,) = prompts(1, seed=9)
    begin += range(3, 3 + MIN_PREFIX_TOKENS)
    for wanted in (prompts(8, longest=40), [begin + prompt for prompt in prompts(8, longest=20)]):
        generations = [make_generation(prompt, 20) for prompt in wanted]
        Decoder(model, max_rows=5, seed=1).run(generations)
        for generation in generations:
            check_logprobs(model, generation)


@pytest.mark.parametrize("family", SLIDING)
def test_logprobs_are_right_with_a_sliding_window_shorter_than_the_prompt(
    family: str, tmp_path: Path
) -> None:
    check_family(tmp_path, family, SLIDING[family])


@pytest.mark.parametrize("family", OPTIONS)
def test_logprobs_are_right_with_each_option_of_a_model_family(family: str, tmp_path: Path) -> None:
    check_family(tmp_path, family, OPTIONS[family])


@pytest.mark.parametrize("kind", ROPES)
def test_logprobs_are_right_with_each_rope_scaling(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0} | ROPES[kind]
    check_family(tmp_path, "llama", {"rope_parameters": rope})


def test_disabled_sliding_window_masks_no_token(tmp_path: Path) -> None:
    settings = WINDOW | {"use_sliding_window": False}
    check_family(tmp_path, "qwen2", settings)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sampled_logprobs_equal_a_plain_forward_pass(model: Any, temperature: float) -> None:
    generations = [
        make_generation(p, 5 + 3 * i, temperature=temperature) for i, p in enumerate(prompts(12))
    ]
    Decoder(model, max_rows=5, seed=1).run(generations)
    for generation in generations:
        assert len(generation.output) == generation.limit
        check_logprobs(model, generation, temperature)


def test_requests_of_one_batch_keep_their_sampling_settings(qwen: Any) -> None:
    greedy, hot, cut = (
        make_generation([5, 6], 30, temperature=0.0),
        make_generation([5, 6], 30, temperature=1.5),
        make_generation([5, 6], 30, top_k=1),
    )
    Decoder(qwen, max_rows=8, seed=0).run([greedy, hot, cut])
    assert greedy.output == cut.output != hot.output
    check_logprobs(qwen, greedy)
    check_logprobs(qwen, hot, 1.5)
    check_logprobs(qwen, cut)


def test_equal_prompts_share_one_prefill_and_are_sampled_separately(
    qwen: Any, monkeypatch: Any
) -> None:
    sizes = []
    forward = Decoder._forward_prompts

    def counted(self: Decoder, batch: Any, *args: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return forward(self, batch, *args, **options)

    monkeypatch.setattr(Decoder, "_forward_prompts", counted)
    generations = [make_generation(p, 12) for p in ([7, 8, 9], [7, 8, 9], [4], [7, 8, 9], [4])]
    Decoder(qwen, max_rows=8, seed=0).run(generations)
    assert sizes == [2]
    assert [g.cached_tokens for g in generations] == [0, 2, 0, 2, 0]
    assert len({tuple(g.output) for g in generations}) == 5
    for generation in generations:
        check_logprobs(qwen, generation)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(prompts, first computed position, position after the last) of each pass over prompts."""
    forward, seen = Decoder._forward_prompts, list[tuple[int, int, int]]()

    def noted(self: Decoder, batch: Any, *args: Any, begin: int = 0, **options: Any) -> Any:
        seen.append((len(batch), begin, max(map(len, batch))))
        return forward(self, batch, *args, begin=begin, **options)

    monkeypatch.setattr(Decoder, "_forward_prompts", noted)
    return seen


BEGINNING = [*range(20, 20 + MIN_PREFIX_TOKENS)]
SYSTEM = len(BEGINNING)


@pytest.mark.parametrize(
    ("tails", "expected"),
    [
        ([[7], [8, 9]], [(1, 0, SYSTEM), (2, SYSTEM, SYSTEM + 2)]),
        ([[7, 8], [7]], [(1, 0, SYSTEM), (2, SYSTEM, SYSTEM + 2)]),  # not the last token
        ([[], [7]], [(2, 0, SYSTEM + 1)]),
        ([[7]], [(1, 0, SYSTEM + 1)]),
    ],
)
def test_beginning_that_all_prompts_of_a_pass_share_is_computed_once(
    tails: list[list[int]],
    expected: list[tuple[int, int, int]],
    qwen: Any,
    passes: list[tuple[int, int, int]],
) -> None:
    running, decoder = make_generation([5, 6, 7], 12), Decoder(qwen, max_rows=8, seed=0)
    with torch.inference_mode():
        decoder.prefill(deque([running]))
    passes.clear()
    generations = [make_generation(BEGINNING + tail, 12) for tail in tails]
    decoder.run(generations)
    assert passes == expected
    for generation in (running, *generations):
        check_logprobs(qwen, generation)


def prefill(decoder: Decoder, *prompts: list[int]) -> list[Generation]:
    """Admit prompts in one pass, and return their generations."""
    generations = [make_generation(prompt, 4) for prompt in prompts]
    with torch.inference_mode():
        decoder.prefill(deque(generations))
    return generations


def test_beginning_of_the_prompt_before_is_computed_once_for_later_prompts(
    qwen: Any, passes: list[tuple[int, int, int]]
) -> None:
    decoder = Decoder(qwen, max_rows=16, seed=0)
    generations = prefill(decoder, [*BEGINNING, 7, 8])
    generations += prefill(decoder, [*BEGINNING, 9])  # only now is the beginning known
    generations += prefill(decoder, [*BEGINNING, 4, 5, 6])
    generations += prefill(decoder, [*BEGINNING, 4, 6], [*BEGINNING, 4, 7])
    generations += prefill(decoder, [3, 4, 5], [4, 5])
    assert passes == [
        (1, 0, SYSTEM + 2),
        (1, 0, SYSTEM),
        (1, SYSTEM, SYSTEM + 1),
        (1, SYSTEM, SYSTEM + 3),
        (2, SYSTEM, SYSTEM + 2),
        (2, 0, 3),
    ]
    assert [each.cached_tokens for each in generations] == [0, 0, *[SYSTEM] * 3, 0, 0]
    decoder.run([])
    for generation in generations:
        check_logprobs(qwen, generation)


def test_new_weights_use_no_beginning_of_the_old_ones(
    tmp_path: Path, passes: list[tuple[int, int, int]]
) -> None:
    folders = [tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    model = load_model(str(folders[0]), dtype="float32", device="cpu")[0]
    decoder, crashes = Decoder(model, max_rows=8, seed=0), list[BaseException]()
    engine = Engine(decoder=decoder, deliver=lambda *_: None, on_crash=crashes.append)
    prefill(decoder, [*BEGINNING, 7], [*BEGINNING, 8])
    engine.pause("in_place")
    with torch.inference_mode():
        job = partial(stage_weights, ServedWeights(model, folders[0]), str(folders[1]))
        assert engine.update(job, "1", False)
    passes.clear()
    (generation,) = prefill(decoder, [*BEGINNING, 9])
    assert passes == [(1, 0, SYSTEM + 1)]
    check_logprobs(model, generation)


def test_long_prompts_are_prefilled_in_bounded_batches(qwen: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 200)
    monkeypatch.setattr(decoder_module, "PREFILL_LOGITS", 64 * 6)
    generations = [make_generation(p, 4) for p in prompts(20, longest=60)]
    Decoder(qwen, max_rows=20, seed=0).run(generations)
    for generation in generations:
        check_logprobs(qwen, generation)


@pytest.mark.parametrize(("max_tokens", "num_passes"), [(8192, 1), (100, 5)])
def test_prompts_are_scored_together(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, max_tokens: int, num_passes: int
) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", max_tokens)
    decoder = Decoder(qwen, max_rows=16, seed=0)
    prompt_logits = decoder._prompt_logits
    sizes = list[torch.Size]()

    def counted(ids_BL: torch.Tensor) -> torch.Tensor:
        sizes.append(ids_BL.shape)
        return prompt_logits(ids_BL)

    monkeypatch.setattr(decoder, "_prompt_logits", counted)
    generations = list[Generation]()
    for number, prompt in enumerate(prompts(16, longest=40)):
        generation = make_generation(prompt, 2)
        generation.scored_from = None if number % 4 == 3 else min(number, len(prompt) - 1)
        generations.append(generation)
    with torch.inference_mode():
        decoder._score_prompts(generations)
    assert len(sizes) == num_passes
    assert all(rows * length <= max_tokens for rows, length in sizes)
    for generation in generations:
        begin = generation.scored_from
        if begin is None:
            assert not generation.prompt_logprobs
            continue
        logprobs_LV = reference_logprobs(qwen, generation.prompt)[begin:]
        expected = logprobs_LV[range(len(logprobs_LV)), generation.prompt[begin + 1 :]]
        assert generation.prompt_logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_min_new_tokens_bans_stop_tokens(qwen: Any) -> None:
    allowed = make_generation([5], 40, stops=range(32))
    banned = make_generation([5], 40, stops=range(32), min_new_tokens=6)
    Decoder(qwen, max_rows=4, seed=0).run([allowed, banned])
    assert all(token >= 32 for token in banned.output[:6])
    assert banned.finish == {"type": "stop", "matched": banned.output[-1]}
    assert len(banned.output) > 6


def test_sampled_tokens_follow_the_model_distribution(qwen: Any) -> None:
    """4,000 draws of one token against its probabilities (chi-square, fixed seed)."""
    generations = [make_generation([5, 6, 7], 1) for _ in range(4000)]
    Decoder(qwen, max_rows=4000, seed=3).run(generations)
    expected = reference_logprobs(qwen, [5, 6, 7, 0])[-1].exp() * 4000
    counts = torch.bincount(torch.tensor([g.output[0] for g in generations]), minlength=64)
    likely = expected > 5
    chi = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=25, deadline=None)
@given(
    limits=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    rows=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_continuous_batching_keeps_requests_independent(
    limits: list[int], rows: int, seed: int
) -> None:
    """Logprobs of each request match its own prompt for any lengths and number of rows."""
    model = shared_model()
    wanted = [
        make_generation(p, n) for p, n in zip(prompts(len(limits), 9, seed), limits, strict=True)
    ]
    Decoder(model, max_rows=rows, seed=seed).run(wanted)
    for generation in wanted:
        assert len(generation.output) == generation.limit
        check_logprobs(model, generation)


@functools.cache
def shared_model() -> Any:
    """Return a model for tests that cannot use fixtures."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config).eval()


# ---------------------------------------------------------------- weights change under requests


class Running:
    """Run an engine on a model; synchronise with events instead of sleeps."""

    def __init__(self, model: Any, *, rows: int = 8) -> None:
        self.engine = Engine(
            decoder=Decoder(model, max_rows=rows, seed=0), deliver=lambda grown, ended: None
        )
        self.brake = Brake(self.engine)
        self.engine.start()

    def call(self, command: Any, *args: Any) -> Future[Any]:
        """Run a method of the engine in the engine's thread."""
        return self.engine.call(command, *args)

    def start(self, generation: Generation) -> None:
        """Submit a request; return when its first tokens exist and the engine is blocked."""
        self.brake.block(free=3)
        self.call(self.engine.submit, generation)
        self.until(lambda: len(generation.output) > 2)

    def until(self, condition: Any) -> None:
        until(condition, what="the engine")

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


def submit_update(
    running: Running, model: Any, folder: Path, version: str, *, flush: bool = True
) -> Future[bool]:
    engine = running.engine
    stage = partial(stage_weights, ServedWeights(model, folder), str(folder))
    return engine.call_between_requests(engine.update, stage, version, flush)


def update(running: Running, model: Any, folder: Path, version: str, *, flush: bool = True) -> bool:
    return submit_update(running, model, folder, version, flush=flush).result(timeout=60)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_update_of_a_paused_engine_keeps_partial_outputs(folders: list[Path], mode: str) -> None:
    """Retract recomputes the prefix under the new weights; in_place keeps the old KV cache."""
    model = load_model(str(folders[0]), dtype="float32", device="cpu")[0]
    old = copy.deepcopy(model)
    generations = [make_generation(p, 60) for p in prompts(6, 12)]
    with Running(model, rows=4) as running:
        running.brake.block(free=6)
        running.call(running.engine.submit, *generations)
        running.until(lambda: len(generations[0].output) >= 5)
        running.call(running.engine.pause, mode).result(timeout=60)
        standing = [len(g.output) for g in generations]
        assert update(running, model, folders[1], "1", flush=mode == "retract")
        assert [len(g.output) for g in generations] == standing
        running.call(running.engine.resume).result(timeout=60)
        running.brake.release()
        running.until(lambda: all(g.ended for g in generations))
    for generation in generations:
        assert generation.finish == {"type": "length", "length": 60}
        split = standing[generations.index(generation)]
        spans = [("default", 0, split), ("1", split, 60)] if split else [("1", 0, 60)]
        assert generation.spans == spans
        whole, start = generation.prompt + generation.output, len(generation.prompt) - 1
        got = torch.tensor(generation.logprobs).double()
        before, after = (reference_logprobs(m, whole)[start:] for m in (old, model))
        index = torch.arange(60)
        before, after = before[index, generation.output], after[index, generation.output]
        torch.testing.assert_close(got[:split], before[:split], atol=1e-5, rtol=0)
        if mode == "retract":
            torch.testing.assert_close(got[split:], after[split:], atol=1e-5, rtol=0)
            assert generation.retractions == (1 if split else 0)
        elif split:
            assert (got[split:] - after[split:]).abs().max() > 1e-3
            assert generation.retractions == 0


def test_update_of_an_in_place_pause_with_flush_cache_reports_no_flush(folders: list[Path]) -> None:
    model = load_model(str(folders[0]), dtype="float32", device="cpu")[0]
    generation = make_generation([5], 300)
    with Running(model) as running:
        running.start(generation)
        running.call(running.engine.pause, "in_place").result(timeout=60)
        assert not update(running, model, folders[1], "1", flush=True)
        assert running.engine.version == "1"


def test_cancelled_update_is_dropped(folders: list[Path]) -> None:
    """A cancelled update neither stops the engine nor changes the weights later."""
    model = load_model(str(folders[0]), dtype="float32", device="cpu")[0]
    busy, queued = make_generation([5], 10**6), make_generation([6], 4)
    with Running(model) as running:
        running.start(busy)
        assert submit_update(running, model, folders[1], "1").cancel()
        running.call(running.engine.submit, queued)
        running.call(running.engine.abort, lambda generation: generation is busy)
        running.brake.release()
        running.until(lambda: queued.ended)
        assert running.call(running.engine.flush).result(timeout=60)
        assert running.engine.version == "default"
    check_logprobs(model, queued)


def test_requests_queued_after_an_update_get_the_new_weights(folders: list[Path]) -> None:
    model = load_model(str(folders[0]), dtype="float32", device="cpu")[0]
    first, second = make_generation([5], 100), make_generation([6], 4)
    with Running(model) as running:
        running.start(first)
        future = submit_update(running, model, folders[1], "1")
        running.call(running.engine.submit, second)
        running.brake.release()
        running.until(lambda: second.ended)
        assert future.result(timeout=60)
    assert first.spans == [("default", 0, 100)]
    assert second.spans == [("1", 0, 4)]


def test_failed_decode_step_fails_its_requests_and_the_engine_continues(
    qwen: Any, monkeypatch: Any
) -> None:
    with Running(qwen) as running:
        monkeypatch.setattr(
            running.engine.decoder, "decode", lambda: (_ for _ in ()).throw(ValueError("boom"))
        )
        failed = [make_generation([5, 6], 9), make_generation([7], 9)]
        running.call(running.engine.submit, *failed)
        running.until(lambda: all(g.ended for g in failed))
        assert all("boom" in (g.error or "") for g in failed)
        monkeypatch.undo()
        good = make_generation([5, 6], 9)
        running.call(running.engine.submit, good)
        running.until(lambda: good.ended)
        check_logprobs(qwen, good)


def test_weights_with_nan_fail_requests(tmp_path: Path) -> None:
    model = load_model(str(tiny_model(tmp_path)), dtype="float32", device="cpu")[0]
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with Running(model) as running:
        generation = make_generation([5], 9)
        running.call(running.engine.submit, generation)
        running.until(lambda: generation.ended)
    assert "not finite" in (generation.error or "")


def test_weight_load_that_fails_midway_crashes_the_engine(qwen: Any) -> None:
    died = threading.Event()
    engine = Engine(
        decoder=Decoder(qwen, max_rows=2, seed=0), deliver=print, on_crash=lambda error: died.set()
    )
    engine.start()

    def load() -> None:
        raise OSError("the disk went away")

    future = engine.call_between_requests(engine.update, lambda: load, "1", True)
    with pytest.raises(OSError, match="went away"):
        future.result(timeout=60)
    assert died.wait(60)
    assert engine.version == "default"
    engine.close()
