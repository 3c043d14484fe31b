"""`arealite.train` in a running event loop, as in a notebook, and what the run's object shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arealite
from arealite.base.errors import ArealiteError, UserError
from arealite.ext.notebook.run import Facts
from tests.docs import fork_server, guarded
from tests.ext.notebook import things
from tests.models import tiny_model
from tests.waiting import until

STEPS = int(str(things.SMALL["trainer.ppo.total_steps"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work in a folder with a tiny model; relative paths are the paths of a user."""
    folder = tmp_path_factory.mktemp("python")
    tiny_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        guarded.install(fork_server.start())
        yield folder
    guarded.uninstall()


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {**things.SMALL, "cluster.name_root": str(folder / "names"), **more}


@pytest.fixture(scope="module")
def run(folder: Path) -> arealite.Run:
    """Train a run to its end, in a running event loop."""

    async def cell() -> arealite.Run:
        return arealite.train(
            model="model",
            dataset=things.ROWS,
            eval_dataset=things.ROWS[:8],
            env=things.Letters,
            overrides=options(folder),
        )

    return asyncio.run(cell())


@pytest.mark.processes
def test_finished_run_has_a_summary(run: arealite.Run, folder: Path) -> None:
    assert run.paths.root == folder / "runs/arealite/trial"
    found = run.summary
    assert (found["state"], found["step"], found["total_steps"]) == ("finished", STEPS, STEPS)
    assert found["reward_first"] == run.metrics()[1]["reward/mean"]
    assert {"held_out_reward_first", "held_out_reward_last"} <= found.keys()
    assert (found["balanced"], found["lost"], found["repeated"]) == (True, 0, 0)
    assert "state" in repr(run) and "finished" in repr(run)
    assert run._repr_html_().startswith("<table><tr><th>state</th><td>finished</td>")


@pytest.mark.processes
def test_metrics_are_one_row_a_step(run: arealite.Run) -> None:
    rows = run.metrics()
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert "eval/reward" in rows[0] and "eval/reward" in rows[-1]
    assert "reward/mean" in rows[-1], "the row has the step and the evaluation after it"


@pytest.mark.processes
def test_trajectories_have_texts_and_exact_tokens(run: arealite.Run) -> None:
    rows = run.trajectories(step=2)
    assert len(rows) == things.SMALL["trainer.ppo.batch_size"]
    assert {row["step"] for row in rows} == {2}
    for row in rows:
        sampled = [t for t, own in zip(row["tokens"], row["loss_mask"], strict=True) if own]
        assert len(sampled) == row["trained_tokens"]
        task = things.ROWS[int(row["task_id"].removeprefix("train-"))]
        assert task["prompt"] in row["prompt"], "a chat template may surround it"
        assert row["reward"] == len(row["completion"]) == row["reward/letters"]
        versions = [v for v, own in zip(row["versions"], row["loss_mask"], strict=True) if own]
        assert (min(versions), max(versions)) == (row["oldest_version"], row["newest_version"])
    json.dumps(rows)  # plain values only, for pandas and others
    newest = run.trajectories(most=5)
    assert [row["step"] for row in newest] == [STEPS] * 5
    assert run.trajectories(step=STEPS + 1) == []


@pytest.mark.processes
def test_folder_of_a_run_opens_it(run: arealite.Run, tmp_path: Path) -> None:
    opened = arealite.Run("runs/arealite/trial")
    assert opened.summary == run.summary
    assert opened.report().read_text().startswith("<!doctype html>")
    with pytest.raises(UserError, match="another process started"):
        opened.stop()
    with pytest.raises(UserError, match="no run folder"):
        arealite.Run(tmp_path)


@pytest.mark.processes
def test_exported_model_is_evaluated_and_sampled(run: arealite.Run, folder: Path) -> None:
    own = options(folder)
    found = arealite.evaluate(
        run.paths.export, dataset=things.ROWS[:4], env=things.Letters, n=2, overrides=own
    )
    assert set(found["reward"]) == {"all"} and set(found) >= {"pass@1", "pass@2"}
    assert (found["failed"], found["results"][0]["samples"]) == (0, 8)
    rows = arealite.collect(
        run.paths.export,
        dataset=things.ROWS[:4],
        env=things.Letters,
        overrides=own | {"out": "kept.parquet"},
    )
    assert [row["task_id"] for row in rows] == [f"train-{n}" for n in range(4)]
    assert all(row["reward"] == len(str(row["text"])) for row in rows)


@pytest.mark.processes
def test_stopped_run_resumes_with_the_same_call(folder: Path) -> None:
    def train(steps: int, *, wait: bool) -> arealite.Run:
        return arealite.train(
            model="model",
            dataset=things.ROWS,
            env=things.Letters,
            trial="stopped",
            overrides=options(folder, **{"trainer.ppo.total_steps": steps}),
            wait=wait,
        )

    run = train(10_000, wait=False)
    assert run.progress()["state"] == "starting"
    until(lambda: run.progress()["step"] > 0, what="the first step", seconds=400)
    run.stop()
    before = run.progress()
    assert before["state"] == "stopped"
    assert run.wait() is run, "a run that was stopped has not failed"
    after = train(int(before["step"]) + 1, wait=True).progress()
    assert (after["state"], after["step"]) == ("finished", before["step"] + 1)


@pytest.mark.processes
def test_offline_trainer_learns_from_rows_in_memory(folder: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["ground_truth"]} for row in things.ROWS]
    run = arealite.train(
        "sft",
        model="model",
        dataset=rows,
        trial="sft",
        eval_dataset=rows[:16],
        overrides={
            "cluster.name_root": "names",
            "trainer.offline.epochs": 8,
            "trainer.offline.lr": 1e-3,
        },
    )
    found = run.summary
    assert found["state"] == "finished"
    assert found["held_out_loss_last"] < found["held_out_loss_first"]
    assert "loss_first" in found
    assert "balanced" not in found, "it has no ledger"
    with pytest.raises(UserError, match="no ledger"):
        run.trajectories()


def test_wrong_input_is_refused_before_a_process_starts(folder: Path) -> None:
    with pytest.raises(UserError, match="no Hugging Face model folder"):
        arealite.train(model="nothing", dataset=things.ROWS, trial="refused")
    with pytest.raises(UserError, match=r"dataset\.train is not set"):
        arealite.train(model="model", trial="refused")
    assert not [*folder.glob("runs/arealite/refused*")]


@pytest.mark.processes
def test_failed_run_raises_with_its_folder_and_error(folder: Path) -> None:
    """The environment fails in the worker only, so the check of this process passes."""
    with pytest.raises(ArealiteError, match=r"runs/arealite/failed failed .*no sample today"):
        arealite.train(
            model="model",
            dataset=things.ROWS,
            env=things.Broken,
            trial="failed",
            overrides=options(folder, **{"datapipe.max_failed_share": 0.1}),
        )
    assert arealite.Run(folder / "runs/arealite/failed").progress()["state"] == "failed"


@pytest.mark.processes
def test_environment_is_served_until_the_block_ends() -> None:
    from urllib.request import urlopen

    with arealite.serve("tic_tac_toe") as server:
        assert urlopen(f"http://{server.address}/health").status == 200
    with pytest.raises(OSError):
        urlopen(f"http://{server.address}/health")
    with pytest.raises(UserError, match="Did you mean 'math'"):
        arealite.serve("maths")


def test_facts_print_as_a_table_without_markup() -> None:
    facts = Facts(a="<b>", long={"x": 0.125, "": 1})
    assert repr(facts) == "a     <b>\nlong  x 0.125,  1"
    assert facts.html() == (
        "<table><tr><th>a</th><td>&lt;b&gt;</td></tr>"
        "<tr><th>long</th><td>x 0.125,  1</td></tr></table>"
    )
