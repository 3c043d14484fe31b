"""Checks of the rows of a run before it starts; they need no server."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.config_tree import check_ranges
from arealite.base.errors import UserError
from arealite.cli import resume
from arealite.cli.main import main
from arealite.cli.preflight import check_options, preflight
from arealite.ext.machine.check_command import report
from arealite.ext.offline.config import DPOConfig, OfflineConfig, SFTConfig
from tests.ext.offline.test_offline import faked, rows, settings
from tests.models import tiny_model
from tests.system.data.test_dataset import jsonl

GOOD = rows(6)


@pytest.fixture
def model(unchanged_model: Path) -> Path:
    """Return a model that no test of this file changes."""
    return unchanged_model


def with_rows(config: ExperimentConfig, folder: Path, found: list[Any]) -> ExperimentConfig:
    return replace(config, dataset=replace(config.dataset, train=jsonl(folder, found)))


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_valid_offline_run_passes_without_a_server(tmp_path, model, kind):
    preflight(settings(tmp_path, model, kind, held_out=3))


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("sft", {"prompt": "1"}, "rows.jsonl, line 3: a row needs the columns"),
        ("dpo", {"prompt": "1", "chosen": "2"}, "rows.jsonl, line 3: a row needs the columns"),
        ("sft", {"tokens": [1, 64], "loss_mask": [0, 1]}, "line 3: token 64 is not among .* 64"),
        ("sft", {"tokens": [1, -1], "loss_mask": [0, 1]}, "line 3: token -1 is not among"),
        ("sft", [1], "line 3: not a JSON object"),
    ],
)
def test_error_names_the_invalid_row(tmp_path, model, kind, row, says):
    config = with_rows(settings(tmp_path, model, kind), tmp_path, [*GOOD[:2], row, *GOOD[2:]])
    with pytest.raises(UserError, match=says):
        preflight(config)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "no dataset"),
        ("x.jsonl", "does not exist"),
        ("x.tsv", "suffix"),
    ],
)
def test_unusable_dataset_is_refused(tmp_path, model, path, says):
    config = settings(tmp_path, model)
    with pytest.raises(UserError, match=says):
        preflight(replace(config, dataset=replace(config.dataset, train=path)))


def test_folder_without_a_model_is_refused(tmp_path, model):
    config = settings(tmp_path, model)
    with pytest.raises(UserError, match="is no Hugging Face model folder"):
        preflight(replace(config, model=replace(config.model, path=str(tmp_path))))


LONG = {"prompt": "1" * 40, "completion": "2"}
"""A row that has no token to train within its first 20 tokens."""
UNUSABLE_ROWS: dict[str, tuple[list[Any], list[Any], str]] = {
    "no row to train": (
        [LONG],
        [],
        r"no row has a token to learn within .*max_tokens=20",
    ),
    # Otherwise each update of the run is skipped, and the run ends as if it had trained.
    "no row to train, and one held out": (
        [LONG, LONG],
        [GOOD[0]],
        r"no row has a token to learn within .*max_tokens=20",
    ),
    # Otherwise the launcher says at the end of the run that every sample failed.
    "rows to train, and none held out": (
        GOOD,
        [LONG],
        r"dataset.eval: no row has a token to learn within",
    ),
    "held-out row of another form": (GOOD, [{"question": "x"}], "line 1: a row needs"),
}
"""Rows to train, held-out rows, and a part of the error message."""


@pytest.mark.parametrize(("trained", "held_out", "says"), UNUSABLE_ROWS.values(), ids=UNUSABLE_ROWS)
def test_unusable_rows_are_refused(tmp_path, model, trained, held_out, says):
    config = with_rows(settings(tmp_path, model, max_tokens=20), tmp_path, trained)
    if held_out:
        folder = tmp_path / "held-out"
        folder.mkdir()
        config = replace(config, dataset=replace(config.dataset, eval=jsonl(folder, held_out)))
    with pytest.raises(UserError, match=says):
        preflight(config)


def test_rows_without_trained_tokens_are_counted(tmp_path, model, capsys):
    config = settings(tmp_path, model, max_tokens=20)
    preflight(with_rows(config, tmp_path, [*GOOD, LONG, LONG]))
    assert "2 rows have no tokens to train and are skipped; the first: " in capsys.readouterr().out


@pytest.mark.parametrize(("size", "steps"), [(2, 10), (3, 12), (2, 9)])
def test_warm_up_of_an_offline_run_is_compared_with_its_updates(
    tmp_path, model, capsys, size: int, steps: int
) -> None:
    """Six rows in batches of two, and two epochs, are six updates."""
    epochs, rows = 2, [GOOD[0]] * 6
    config = settings(tmp_path, model, batch_size=size, epochs=epochs)
    optimizer = replace(config.trainer.offline.optimizer, warmup_steps=steps)
    offline = replace(config.trainer.offline, optimizer=optimizer)
    config = replace(config, trainer=replace(config.trainer, offline=offline))
    preflight(with_rows(config, tmp_path, rows))
    updates = epochs * 6 // size
    says = f"warmup_steps={steps}, but the run has only {updates} optimizer updates"
    assert says in capsys.readouterr().out
    assert offline.total_steps(6) == updates
    enough = replace(offline, optimizer=replace(optimizer, warmup_steps=updates))
    config = replace(config, trainer=replace(config.trainer, offline=enough))
    preflight(with_rows(config, tmp_path, rows))
    assert "warm-up" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("offline", {"lr": 0.0}),
        ("offline", {"lr": float("nan")}),
        ("offline", {"epochs": 0}),
        ("offline", {"batch_size": 0}),
        ("offline", {"max_tokens": 0}),
        ("offline", {"max_steps": -1}),
        ("offline", {"eval_every_steps": -1}),
        ("sft", {"assistant_weight": -1.0}),
        ("sft", {"assistant_weight": 0.0}),
        ("sft", {"turns": "last", "next_state_weight": 0.1}),
        ("offline", {"checkpoint_keep": 0}),
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
    ],
)
def test_offline_numbers_out_of_range_are_refused(tmp_path, model, part, options):
    kinds = {"offline": OfflineConfig, "sft": SFTConfig, "dpo": DPOConfig}
    config = settings(tmp_path, model)
    trainer = replace(config.trainer, **{part: kinds[part](**options)})
    with pytest.raises(UserError, match=f"trainer.{part}"):
        check_ranges(replace(config, trainer=trainer))
        check_options(replace(config, trainer=trainer))


def test_dpo_reference_needs_the_policys_vocabulary(tmp_path, model):
    config = settings(tmp_path, model, "dpo")
    other = tiny_model(tmp_path / "other", vocab=80)
    for path, says in ((other, "has 80 token ids, but"), (tmp_path, "is no Hugg")):
        trainer = replace(config.trainer, dpo=DPOConfig(reference=str(path)))
        with pytest.raises(UserError, match=f"trainer.dpo.reference={path} {says}"):
            preflight(replace(config, trainer=trainer))


def test_resume_option_of_an_offline_run_is_checked(tmp_path, model):
    config = settings(tmp_path, model, checkpoint_every_steps=2, checkpoint_keep=9)
    preflight(config)
    preflight(replace(config, resume="never"))
    with pytest.raises(UserError, match="has no run to resume"):
        preflight(replace(config, resume="must"))
    faked(config).train()
    for wanted in ("auto", "must", "never", "step-000004"):
        preflight(replace(config, resume=wanted))
    with pytest.raises(UserError, match="step-000003 is no valid checkpoint"):
        preflight(replace(config, resume="step-000003"))
    with pytest.raises(UserError, match=r"started with seed=1, now it is 2\. Use 1"):
        preflight(replace(config, seed=2))
    with pytest.raises(UserError, match=r"started with batch_size=4, now it is 5"):
        offline = replace(config.trainer.offline, batch_size=5)
        preflight(replace(config, trainer=replace(config.trainer, offline=offline)))
    with pytest.raises(UserError, match=r"started with trainer\.type=sft, now it is dpo"):
        preflight(replace(config, trainer=replace(config.trainer, type="dpo")))
    with pytest.raises(UserError, match="started with dataset_digest="):
        preflight(with_rows(config, tmp_path, rows(10)[::-1]))
    back = resume.prepare_folder(replace(config, resume="step-000004"))
    assert back.resume == "auto"
    paths = run_paths(config)
    left = sorted(path.name for path in paths.checkpoints.iterdir())
    assert left == ["step-000002", "step-000004"] and not paths.ledger.exists()
    trainer = faked(back)
    trainer.train()
    assert len(trainer.engine.batches) == 2, "steps 4 and 5 again"  # type: ignore[attr-defined]


def checked(folder: Path, model: Path, found: list[Any], words: list[str]) -> int:
    """Run `arealite check` on rows for the environment math.

    Args:
        folder: Gets the rows.
        model: The model's folder.
        found: The rows.
        words: More options.
    """
    options = {
        "model.path": model,
        "dataset.train": jsonl(folder, found),
        "cluster.run_root": folder,
        "cluster.name_root": folder / "names",
        "trainer.ppo.batch_size": 4,
        "trainer.ppo.collector.group_size": 4,
        "trainer.ppo.collector.sampling.max_new_tokens": 4,
    }
    return main(["check", *(f"{key}={value}" for key, value in options.items()), *words])


FUNCTIONS = """
def reward(completion, ground_truth):
    return completion == ground_truth

def rated(completions, difficulty, **columns):
    return [0.0 for _ in completions]

def stateful(completions, trainer_state, **columns):
    return [0.0]
"""
REWARD = "trainer.ppo.collector.env.math.reward."


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of FUNCTIONS, which stands for FILE in the options of a table."""
    file = tmp_path_factory.mktemp("functions") / "check_functions.py"
    file.write_text(FUNCTIONS)
    return file


def function(name: str) -> list[str]:
    """Return the options of a reward function of FUNCTIONS, in the file FILE."""
    return [f"{REWARD}type=function", f"{REWARD}function.paths=[FILE:{name}]"]


def in_file(words: list[str], file: Path) -> list[str]:
    """Return options with the path of FUNCTIONS instead of FILE."""
    return [word.replace("FILE:", f"{file}:") for word in words]


SHOWN: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a known form": (
        {"question": "1+1?", "answer": "We add.\n#### 2", "difficulty": 1},
        [],
        [
            "data       GSM8K rows: question/answer, `####` answers",
            "example    prompt '1+1?', ground_truth '2'\n",
        ],
    ),
    "named columns": (
        {"q": [{"role": "user", "content": "1" * 9}], "a": 2, "answer": 5},
        ["dataset.columns={prompt: q, ground_truth: a}"],
        [
            "data       dataset.columns: prompt=q, ground_truth=a",
            "example    prompt '111111111', ground_truth '2'\n",
        ],
    ),
    "columns of a function": (
        {"prompt": "1+1?", "difficulty": 3},
        function("rated"),
        ["example    prompt '1+1?', ground_truth None, columns difficulty"],
    ),
}
"""A row, options, and lines of the output."""


@pytest.mark.parametrize(("row", "words", "lines"), SHOWN.values(), ids=SHOWN)
def test_check_shows_the_form_and_the_first_row(
    tmp_path, model, capsys, functions, row, words, lines
) -> None:
    assert checked(tmp_path, model, [row, row], in_file(words, functions)) == 0
    out = capsys.readouterr().out
    for line in ["data       2 tasks to train, 0 held out", *lines]:
        assert line in out


UNSCORED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no truth": (
        {"prompt": "1"},
        [],
        "line 2: environment math cannot read it: EpisodeError: train-1 has",
    ),
    "unreadable truth": (
        {"prompt": "1", "ground_truth": "???"},
        [],
        "line 2: environment math cannot read it: Bad",
    ),
    "empty truth": (
        {"prompt": "1", "ground_truth": ""},
        [],
        "can be compared with ground_truth=''",
    ),
    "truth of spaces": (
        {"prompt": "1", "ground_truth": " "},
        [f"{REWARD}type=exact_match"],
        "truth is empty",
    ),
    "function without its truth": (
        {"prompt": "1"},
        function("reward"),
        "line 2: environment math cannot read it: EpisodeError: reward function .*:reward: "
        "missing a required argument: 'ground_truth'. The row has the columns none",
    ),
    "function without its column": (
        {"prompt": "1", "ground_truth": "1"},
        function("rated"),
        "line 1: .*'difficulty'. The row has the columns ground_truth",
    ),
    "function that needs a trainer": (
        {"prompt": "1", "ground_truth": "1"},
        function("stateful"),
        "line 1: .*missing a required argument: 'trainer_state'",
    ),
    "misspelled function": (
        {"prompt": "1"},
        function("rewards"),
        "Unknown function 'rewards'. Did you mean 'reward'",
    ),
    "generated rows": (
        {"prompt": "1", "ground_truth": "1"},
        [*function("rated"), "dataset.train=generated", "dataset.rows=4"],
        "the first row that math generates: environment math cannot read it",
    ),
}
"""A row after a valid one, options, and a pattern of the error message."""


@pytest.mark.parametrize(("row", "words", "says"), UNSCORED.values(), ids=UNSCORED)
def test_row_that_cannot_be_scored_is_refused(
    tmp_path, model, capsys, functions, row, words, says
) -> None:
    rows = [{"prompt": "2", "ground_truth": "2"}, row]
    assert checked(tmp_path, model, rows, in_file(words, functions)) == 2
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
            "6 rows to train, 0 held out; ShareGPT rows: messages",
        ),
        (
            {"prompt": "1", "completion": "2"},
            "6 rows to train, 0 held out; rows: prompt/completion",
        ),
    ],
)
def test_check_shows_the_form_of_offline_rows(tmp_path, model, row, says) -> None:
    config = with_rows(settings(tmp_path, model), tmp_path, [row] * 6)
    assert ("data", says) in [*report(config)]
