"""Several adapters in a session: trained, sampled, published and failing on their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import arealite
from arealite.api.engine import LossInput, Sequence
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import RoleError, UserError
from arealite.ext.embedded import server_app
from arealite.ext.embedded.generation import Generation
from arealite.ext.embedded.served_adapters import LowRank
from arealite.ext.embedded.server_app import App
from arealite.ext.session.call_loss import make_loss, weighted_rows
from tests.ext.session.conftest import Open, Opened
from tests.fakes.embedded import running, server_config
from tests.fakes.peft_adapters import PATTERNS, theirs_warns, write_peft_adapter
from tests.waiting import eventually

PROMPT = [5, 6, 7, 8]
EXACT = 1e-4
BOTH = ["alice", "bob"]
MIXED = {"engine.fsdp.layout": "padded"}


def imitate(batch: LossInput) -> torch.Tensor:
    """Return Σ weight · −logprob."""
    return -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum()


def fail(batch: LossInput) -> torch.Tensor:
    raise ZeroDivisionError("no loss")


def answers(adapter: str, token: int, count: int = 4) -> list[Sequence]:
    """Return rows in which an adapter answers with one token."""
    rows = list[Sequence]()
    for length in range(4, 4 + count):
        tokens = np.array([*PROMPT, *[token] * length], np.int32)
        is_answer = np.arange(len(tokens)) >= len(PROMPT)
        rows.append(Sequence(tokens=tokens, loss_mask=is_answer, temperature=1.0, adapter=adapter))
    return rows


async def train(
    session: arealite.Session, tokens: dict[str, int], updates: int = 4, lr: float = 20.0
) -> None:
    """Teach each adapter a token, in mixed calls."""
    rows = [row for adapter, token in tokens.items() for row in answers(adapter, token)]
    for _ in range(updates):
        session.forward_backward(rows, imitate)
        for adapter in tokens:
            await session.optim_step(lr=lr, adapter=adapter)


async def difference(session: arealite.Session, samples: list[arealite.Sample]) -> float:
    """Return the largest difference between the logprobs of samples and of the trainer."""
    expected = await session.forward([sample.row() for sample in samples])
    differences = list[float]()
    for sample, logprobs_T in zip(samples, expected, strict=True):
        output_N = logprobs_T[len(sample.prompt_ids) :]
        differences.append(float(np.abs(output_N - sample.logprobs).max()))
    return max(differences)


def weights_of(session: arealite.Session, adapter: str) -> dict[str, torch.Tensor]:
    weights = session._policy.ranks.local.trained[adapter]
    return {name: tensor.clone() for name, tensor in weights.stream_adapter()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# ------------------------------------------------------------ beside each other


@pytest.mark.parametrize("overrides", [{}, MIXED])
async def test_adapters_learn_different_things_and_answer_beside_each_other(
    overrides: dict[str, Any], opened: Open
) -> None:
    async with opened(adapters=BOTH, overrides=overrides | {"optimizer.type": "adamw"}) as parts:
        session = parts.session
        assert session.adapters == ("alice", "bob")
        before = await session.forward(answers("", 9) + answers("alice", 9))
        base_logprobs = np.concatenate(before[:4])
        np.testing.assert_allclose(np.concatenate(before[4:]), base_logprobs, atol=1e-6)
        await train(session, {"alice": 9, "bob": 11}, updates=12, lr=0.05)
        report = await session.publish(adapter="alice")
        await session.publish(adapter="bob")
        assert (report.version, report.servers) == (1, 1)
        calls = [session.sample(PROMPT, n=4, max_tokens=12, adapter=name) for name in ("", *BOTH)]
        base, alice, bob = [await call for call in calls]
        for samples in (base, alice, bob):
            assert await difference(session, samples) < EXACT
        after = await session.forward(answers("", 9))
        gains = dict[tuple[str, int], float]()
        for name in BOTH:
            for token in (9, 11):
                own = np.concatenate(await session.forward(answers(name, token)))
                of_base = np.concatenate(await session.forward(answers("", token)))
                gains[name, token] = float((own - of_base)[own != 0].mean())
    assert min(gains["alice", 9], gains["bob", 11]) > 1.0
    assert max(gains["alice", 11], gains["bob", 9]) < 0.0
    np.testing.assert_allclose(np.concatenate(after), base_logprobs, atol=1e-6)
    assert {sample.adapter for sample in alice} == {"alice"}
    assert {version for sample in base for version in sample.versions} == {0}
    assert {version for sample in alice for version in sample.versions} == {1}
    row = alice[0].row()
    assert row.adapter == "alice"
    assert row.fields["versions"][row.loss_mask].tolist() == alice[0].versions


async def test_publish_interrupts_only_the_answers_of_its_adapter(opened: Open) -> None:
    async with opened(lora=2, adapters=BOTH) as parts:
        session = parts.session
        await train(session, {"alice": 9}, updates=2)
        parts.brake.block()
        calls = [session.sample(PROMPT, n=3, max_tokens=60, adapter=name) for name in ("", *BOTH)]
        await eventually(lambda: parts.num_open() == 9)
        open_generations = await _open(parts)
        publishing = session.publish(adapter="alice")
        parts.brake.release()
        assert (await publishing).version == 1
        base, alice, bob = [await call for call in calls]
        assert [session.version, *map(session.adapter_version, BOTH)] == [0, 1, 0]
        for samples in (base, bob):
            assert {version for sample in samples for version in sample.versions} == {0}
            assert await difference(session, samples) < EXACT
    assert any(set(sample.versions) == {0, 1} for sample in alice)
    retracted = {g.adapter for g in open_generations if g.retractions}
    assert retracted == {"alice"}


async def _open(parts: Opened) -> list[Generation]:
    """Return the generations that run or wait at the server."""
    engine = parts.server.engine
    return [*engine.decoder.running, *engine.waiting]


async def test_default_adapter_and_named_ones_have_versions_and_staleness_of_their_own(
    opened: Open,
) -> None:
    async with opened(lora=2, adapters=["alice"], max_staleness=1) as parts:
        session = parts.session
        default = session.rows(await session.sample(PROMPT, n=2, max_tokens=4), [1.0, 0.0])
        samples = await session.sample(PROMPT, n=2, max_tokens=4, adapter="alice")
        named = session.rows(samples, [1.0, 0.0])
        for _ in range(2):
            session.forward_backward(named, loss="reinforce")
            session.optim_step(lr=1.0, adapter="alice")
            await session.publish(adapter="alice")
        assert (session.version, session.adapter_version("alice")) == (0, 2)
        session.forward_backward(default, loss="reinforce")
        session.optim_step(lr=1.0)
        await session.publish()
        assert (session.version, session.adapter_version("alice")) == (1, 2)
        session.forward_backward(default, loss="reinforce")
        with pytest.raises(UserError, match=r"row 2 has tokens of version 0.* have version 2: max"):
            session.forward_backward(default + named)
        for name, version in (("", 1), ("alice", 2)):
            samples = await session.sample(PROMPT, n=2, max_tokens=4, adapter=name)
            assert {v for sample in samples for v in sample.versions} == {version}
            assert await difference(session, samples) < EXACT


async def test_seed_makes_answers_reproducible(opened: Open) -> None:
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        options: dict[str, Any] = {"n": 3, "max_tokens": 10, "adapter": "alice"}
        first = await session.sample(PROMPT, seed=5, **options)
        others = session.sample(PROMPT, **options)
        again = await session.sample(PROMPT, seed=5, **options)
        shifted = await session.sample(PROMPT, seed=6, **options)
        await others
    outputs = [sample.output_ids for sample in first]
    assert [sample.output_ids for sample in again] == outputs
    assert [sample.output_ids for sample in shifted][:2] == outputs[1:]
    assert len({tuple(ids) for ids in outputs}) > 1


def test_default_weights_of_tokens_do_not_depend_on_other_adapters() -> None:
    loss = make_loss(ExperimentConfig(), imitate, {})
    alone = weighted_rows("evaluate", answers("alice", 9), loss, max_tokens=8)
    mixed = weighted_rows(
        "evaluate", answers("bob", 9, count=2) + answers("alice", 9), loss, max_tokens=8
    )
    for left, right in zip(alone, mixed[2:], strict=True):
        np.testing.assert_array_equal(left.fields["loss_weight"], right.fields["loss_weight"])


# ------------------------------------------------------------ failures


async def test_failure_of_an_adapter_touches_no_other_adapter(opened: Open) -> None:
    async with opened(adapters=[*BOTH, "carol"]) as parts:
        session = parts.session
        session.forward_backward(answers("bob", 9), imitate)
        expected = await session.optim_step(lr=0.0, adapter="bob")
        session.forward_backward(answers("bob", 9), imitate)
        session.forward_backward(answers("alice", 9), imitate)
        failed = session.forward_backward(answers("alice", 9) + answers("carol", 9), fail)
        skipped = session.forward_backward(answers("alice", 9), imitate)
        also_skipped = session.forward_backward(answers("carol", 9), imitate)
        assert await session.optim_step(lr=0.0, adapter="bob") == expected
        await session.sample(PROMPT, max_tokens=2, adapter="bob")
        assert failed.done()
        with pytest.raises(ZeroDivisionError):
            session.publish(adapter="alice")
        for call in (skipped, also_skipped):
            with pytest.raises(ZeroDivisionError):
                await call
        for adapter in ("alice", "carol"):
            with pytest.raises(UserError, match="there is no gradient"):
                await session.optim_step(lr=0.1, adapter=adapter)
        session.forward_backward(answers("alice", 9), imitate)
        await session.optim_step(lr=0.1, adapter="alice")


async def test_failure_of_an_adapter_that_nobody_awaits_raises_at_the_end(opened: Open) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(adapters=BOTH) as parts:
            parts.session.forward_backward(answers("alice", 9), fail)
            parts.session.forward_backward(answers("bob", 9), imitate)
            await parts.session.optim_step(lr=1.0, adapter="bob")


async def test_wrong_calls_are_one_line(opened: Open) -> None:
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        for call, error in (
            (lambda: session.sample(PROMPT, adapter="bob"), "no adapter 'bob'. Adapters: alice"),
            (lambda: session.forward(answers("bob", 9)), "no adapter 'bob'"),
            (lambda: session.forward_backward(answers("", 9)), "the model itself is frozen"),
            (session.optim_step, "the model itself is frozen.*lora=32"),
            (session.publish, "the model itself is frozen"),
            (lambda: session.save("x"), "the model itself is frozen"),
            (lambda: session.load("x"), "the model itself is frozen"),
            (lambda: session.add_adapter("alice"), "there is an adapter 'alice' already"),
            (lambda: session.add_adapter("a/b"), "use letters, digits"),
            (lambda: session.add_adapter("b", rank=-1), "add_adapter: rank=-1"),
            (lambda: session.add_adapter("b", rank=0), "rank=0"),
            (lambda: session.add_adapter("b", optimizer={"beta": 1}), "no option 'beta'"),
            (lambda: session.remove_adapter("bob"), "no adapter 'bob'"),
            (lambda: session.adapter_version("bob"), "no adapter 'bob'"),
        ):
            with pytest.raises(UserError, match=error):
                call()
        with pytest.raises(UserError, match=r"modules \['w_in'\] not found"):
            await session.add_adapter("bob", targets=["w_in"])
        assert session.adapters == ("alice",)
        await session.add_adapter("bob", rank=2, targets=["q_proj"], seed=3)
        assert session.adapters == ("alice", "bob")
        samples = await session.sample(PROMPT, adapter="bob", max_tokens=2)
        assert await difference(session, samples) < EXACT
    async with opened() as parts:
        with pytest.raises(UserError, match=r"add_adapter 'bob'.*engine\.fsdp\.lora\.rank"):
            await parts.session.add_adapter("bob")


@pytest.mark.parametrize(
    ("adapters", "error"),
    [(["alice", "alice"], "'alice' is in the list twice"), (["a.b"], "use letters, digits")],
)
async def test_wrong_names_are_refused_before_a_process_starts(
    adapters: list[str], error: str, model: Path, options: dict[str, Any]
) -> None:
    session = arealite.session(model, adapters=adapters, overrides=options)
    with pytest.raises(UserError, match=error):
        await session
    assert session._sampler is None


async def test_servers_without_named_adapters_are_one_line(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = App.describe
    async with opened(lora=2) as parts:

        def without_adapters(app: App) -> dict[str, object]:
            return {k: v for k, v in describe(app).items() if k != "adapters"}

        monkeypatch.setattr(App, "describe", without_adapters)
        parts.server._model.changed.set()
        await eventually(lambda: "adapters" not in _entry(parts))
        with pytest.raises(UserError, match="cannot load adapters by name"):
            await parts.session.add_adapter("alice")


def _entry(parts: Opened) -> dict[str, Any]:
    (entry,) = parts.server._registry.list("llm_server")
    return entry.value


# ------------------------------------------------------------ names


async def test_state_is_saved_and_loaded_by_name(opened: Open, tmp_path: Path) -> None:
    adamw = {"optimizer.type": "adamw"}
    async with opened(adapters=BOTH, overrides=adamw) as parts:
        session = parts.session
        await train(session, {"alice": 9, "bob": 11}, updates=1)
        bob = weights_of(session, "bob")
        session.save("state", adapter="alice")
        await train(session, {"alice": 9}, updates=1)
        expected = weights_of(session, "alice")
        await session.load("state", adapter="alice")
        assert_equal(weights_of(session, "bob"), bob)
        await train(session, {"alice": 9}, updates=1)
        assert_equal(weights_of(session, "alice"), expected)
        await session.export(tmp_path / "alice", adapter="alice")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "alice").iterdir()
    }
    async with opened(adapters=["dave"], overrides=adamw) as parts:
        session = parts.session
        session.load("state", adapter="dave")
        await train(session, {"dave": 9}, updates=1)
        assert_equal(weights_of(session, "dave"), expected)
        session.add_adapter("small", rank=2)
        with pytest.raises(UserError, match="use the model and the rank"):
            await session.load("state", adapter="small")


@theirs_warns
async def test_adapter_with_patterns_is_trained_served_and_exported_as_peft_reads_it(
    model: Path, opened: Open, tmp_path: Path
) -> None:
    """Layers have other ranks and alphas than the rest; the scaling is alpha / √rank."""
    import peft

    write_peft_adapter(model, tmp_path / "start")
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        session.add_adapter("theirs", folder=tmp_path / "start")
        await train(session, {"alice": 9, "theirs": 11}, updates=2)
        report = await session.publish(adapter="theirs")
        calls = [session.sample(PROMPT, n=2, max_tokens=12, adapter=a) for a in ("alice", "theirs")]
        _, samples = [await call for call in calls]
        assert await difference(session, samples) < EXACT
        (trained,) = await session.forward(answers("theirs", 11, count=1))
        await session.export(tmp_path / "end", adapter="theirs")
    assert (report.servers, report.quarantined) == (1, [])
    written = json.loads((tmp_path / "end" / "adapter_config.json").read_text())
    assert {name: written[name] for name in PATTERNS} == PATTERNS
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "end"))
    tokens = torch.tensor([[*PROMPT, *[11] * 4]])
    with torch.no_grad():
        logits_TV = loaded(tokens).logits[0].float()
    expected = logits_TV.log_softmax(-1)[len(PROMPT) - 1 : -1, 11]
    np.testing.assert_allclose(trained[len(PROMPT) :], expected, atol=EXACT)


async def test_removed_adapter_ends_its_samples_and_its_name_is_free(opened: Open) -> None:
    async with opened(adapters=BOTH) as parts:
        session = parts.session
        await train(session, {"alice": 9}, updates=2)
        await session.publish(adapter="alice")
        first = weights_of(session, "bob")
        parts.brake.block()
        sampling = session.sample(PROMPT, n=2, max_tokens=100, adapter="alice")
        other = session.sample(PROMPT, n=2, max_tokens=20, adapter="bob")
        await eventually(lambda: parts.num_open() == 4)
        removing = session.remove_adapter("alice")
        adding = session.add_adapter("alice", seed=1)
        fresh = session.sample(PROMPT, n=4, max_tokens=8, adapter="alice")
        parts.brake.release()
        await removing
        with pytest.raises(UserError, match="the adapter 'alice' was removed"):
            await sampling
        assert (await adding).version == session.adapter_version("alice") == 2
        samples = await fresh
        assert {version for sample in samples for version in sample.versions} == {2}
        assert await difference(session, samples) < EXACT
        assert {version for sample in await other for version in sample.versions} == {0}
        await session.remove_adapter("alice")
        assert session.adapters == ("bob",)
        assert parts.server.engine.adapter_versions == {"bob": "0"}
        assert_equal(weights_of(session, "bob"), first)
        folder = session._policy._publisher.folder / "adapters"  # type: ignore[union-attr]
        assert {path.name for path in folder.glob("*/*")} == {"0"}, "only bob's files are left"


async def test_publishes_in_a_row_arrive_in_their_order(opened: Open) -> None:
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        calls = list[Any]()
        for _ in range(6):
            session.forward_backward(answers("alice", 9), imitate)
            session.optim_step(lr=2.0, adapter="alice")
            calls.append(session.publish(adapter="alice"))
        assert [(await call).version for call in calls] == [1, 2, 3, 4, 5, 6]
        samples = await session.sample(PROMPT, n=4, max_tokens=4, adapter="alice")
        assert {version for sample in samples for version in sample.versions} == {6}
        assert await difference(session, samples) < EXACT


# ------------------------------------------------------------ servers


async def test_server_that_starts_late_gets_the_adapters(
    opened: Open, model: Path, tmp_path: Path
) -> None:
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        await train(session, {"alice": 9}, updates=2)
        await session.publish(adapter="alice")
        async with running(server_config(model, tmp_path / "names")) as late:
            await eventually(lambda: late.engine.adapter_versions == {"alice": "1"})
            samples = await session.sample(PROMPT, n=8, max_tokens=4, adapter="alice")
            assert await difference(session, samples) < EXACT
            assert (await session.publish(adapter="alice")).servers == 2


async def test_request_waits_while_no_server_has_the_adapter(opened: Open) -> None:
    async with opened(adapters=["alice"]) as parts:
        session = parts.session
        await session.sample(PROMPT, max_tokens=2, adapter="alice")
        served = parts.server._model.adapters
        version = served.pop("alice")  # the server's entry still lists it
        sampling = session.sample(PROMPT, max_tokens=2, adapter="alice")
        await eventually(lambda: session._sampler._client.stats()["stale_answers"] >= 1)  # type: ignore[union-attr]
        assert not sampling.done()
        served["alice"] = version
        parts.server._model.changed.set()
        samples = await sampling
        assert await difference(session, samples) < EXACT


async def test_server_with_other_weights_of_an_adapter_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(adapters=BOTH) as parts:
        session = parts.session
        await train(session, {"alice": 9, "bob": 11}, updates=2)
        read = server_app.read_low_rank

        def twice_scaled(*arguments: Any) -> dict[str, LowRank]:
            low_rank = read(*arguments)
            return {
                name: replace(matrices, up_OR=2 * matrices.up_OR)
                for name, matrices in low_rank.items()
            }

        monkeypatch.setattr(server_app, "read_low_rank", twice_scaled)
        with pytest.raises(RoleError, match=r"other log-probabilities with version 1 of 'alice'"):
            await session.publish(adapter="alice")
        assert parts.server.engine.adapter_versions.get("alice") != "1"
        monkeypatch.undo()
        await session.publish(adapter="alice")
        samples = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert await difference(session, samples) < EXACT


async def test_refused_adapter_is_an_error_of_its_publish(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(adapters=BOTH) as parts:
        session = parts.session
        with torch.no_grad():
            for param in session._policy.ranks.local.trained["alice"].optimizer.parameters.values():  # type: ignore[attr-defined]
                param.fill_(float("nan"))
        with pytest.raises(RoleError, match=r"version 1 of the adapter 'alice'.*is not finite"):
            await session.publish(adapter="alice")
        await session.publish(adapter="bob")
        samples = await session.sample(PROMPT, max_tokens=2, adapter="alice")
        assert set(samples[0].versions) == {0}
