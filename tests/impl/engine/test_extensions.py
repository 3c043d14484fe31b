"""Extensions of the engine: called in order, of any package, and absent from plain runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.engine import LossFn, LossInput, Sequence
from arealite.api.engine_extension import EngineExtension, EngineSetup, Full, MicroBatch
from arealite.base import entries
from arealite.impl.engine.extensions import Extensions
from tests.impl.engine.helpers import LOSS, make_engine, make_rows, weights


class Noted(EngineExtension):
    """Notes its calls; adds rows, and changes each thing that an extension can change."""

    def __init__(self, name: str = "", before: int = 0, calls: list[str] | None = None) -> None:
        self._name = name
        self._before = before
        self.calls = [] if calls is None else calls

    def change_layers(self) -> None:
        self.calls.append(f"{self._name}layers")

    def finish_loading(self) -> None:
        self.calls.append(f"{self._name}loaded")

    def frozen(self) -> None:
        self.calls.append(f"{self._name}frozen")

    def gather_rows(self, rows: list[Sequence]) -> tuple[list[Sequence], int]:
        return [*make_rows(self._before), *rows, *make_rows(1)], self._before

    def gather_outputs(
        self, outputs: dict[str, torch.Tensor], batch: MicroBatch
    ) -> dict[str, torch.Tensor]:
        self.calls.append(f"{self._name}outputs")
        return outputs

    def added_loss(self, loss_fn: LossFn, rows: list[Sequence]) -> LossFn:
        def doubled(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, stats = loss_fn(batch)
            return 2 * loss, stats | {"doubled": 2 * loss.detach()}

        return doubled

    def take_stats(self) -> dict[str, float]:
        return {"taken": 1.0}

    def merged(self, name: str, weight: torch.Tensor, full: Full) -> torch.Tensor | None:
        return full(weight.detach()) + 1 if name == "model.norm.weight" else None

    def export(self, folder: Path | None, full: Full) -> None:
        assert folder is not None
        (folder / "noted").touch()


@pytest.mark.usefixtures("group")
def test_extension_of_another_package_changes_the_engine_at_each_moment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, extension, setups = make_engine(model), Noted(), list[EngineSetup]()

    def make(setup: EngineSetup) -> EngineExtension:
        setups.append(setup)
        return extension

    hooks_of = entries.hooks
    others = {"engine_extension": [make, lambda setup: None]}
    monkeypatch.setattr(entries, "hooks", lambda group: others.get(group) or hooks_of(group))
    engine, rows = make_engine(model, layout="padded"), make_rows()
    assert extension.calls == ["layers", "loaded"]
    (setup,) = setups
    assert (setup.module, setup.source, setup.is_trained) == (engine.module, model, True)
    outputs, ours = plain.forward(rows)["logprobs"], engine.forward(rows)["logprobs"]
    for one, other in zip(ours, outputs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert extension.calls[2:] == ["outputs"] * len(extension.calls[2:]) != []
    theirs, changed = weights(plain), weights(engine)
    assert {name for name in theirs if not torch.equal(theirs[name], changed[name])} == {
        "model.norm.weight"
    }
    stats = engine.train_batch(rows, LOSS)
    assert stats["doubled"] == pytest.approx(2 * stats["loss"])
    assert stats["taken"] == 1.0
    engine.export(tmp_path / "export")
    assert (tmp_path / "export" / "noted").exists()
    engine.without_adapter().forward(rows)
    assert extension.calls[-1] == "frozen"


@given(st.lists(st.integers(0, 3), max_size=4))
def test_rows_of_a_rank_are_found_among_those_of_all_extensions(before: list[int]) -> None:
    rows = make_rows(5)
    gathered, first = Extensions([Noted(before=count) for count in before]).gather_rows(rows)
    own = gathered[first : first + len(rows)]
    assert all(one is other for one, other in zip(own, rows, strict=True))
    assert len(gathered) == len(rows) + sum(before) + len(before)


def test_extensions_are_called_in_order_and_undone_in_reverse() -> None:
    calls = list[str]()
    both = Extensions([Noted("a ", calls=calls), Noted("b ", calls=calls)])
    both.change_layers()
    both.gather_outputs({}, None)  # type: ignore[arg-type]
    assert calls == ["a layers", "b layers", "b outputs", "a outputs"]


PLAIN = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.impl.engine.helpers import LOSS, make_engine, make_rows
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
make_engine(Path(sys.argv[1]), layout="padded").train_batch(make_rows(), LOSS)
print(sorted(name for name in sys.modules if name.startswith("arealite.ext.models.")))
"""


@pytest.mark.processes
def test_plain_run_imports_only_what_each_engine_uses_of_models(model: Path) -> None:
    command = [sys.executable, "-c", PLAIN, str(model)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    used = ("engine_extensions", "fast_linear", "output_head")
    expected = [f"arealite.ext.models.{name}" for name in used]
    assert run.stdout.splitlines()[-1] == str(expected)
