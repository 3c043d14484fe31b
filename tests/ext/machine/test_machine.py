"""`arealite check --machine`: every row runs here; a fault of a row is that row's failure alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arealite.base.errors import UserError
from arealite.base.files import read_toml
from arealite.ext.machine import check_command, command

TABLE = read_toml(command.__file__, "rows.toml")
PLAN = {"quick": True, "gpus": 0, "limit_s": 200.0, "python": "/no/python"}


def row(name: str, **values: Any) -> command.PlannedCheck:
    return command.DEFAULTS | {"name": name} | TABLE.get(name, {}) | values


def planted(function: str, **values: Any) -> command.PlannedCheck:
    return row(function, run=f"tests.ext.machine.machine_faults:{function}", **values)


GROUPS = {
    "one rank": [name for name in TABLE if row(name)["ranks"] == 1 and not row(name)["server"]],
    "two ranks": ["checkpoint", *(name for name in TABLE if row(name)["ranks"] == 2)],
    "embedded": [name for name in TABLE if row(name)["server"] == "embedded"],
}
GROUPS["one rank"].remove("resume/2 ranks to 1")
GROUPS["two ranks"].append("resume/2 ranks to 1")


@pytest.mark.processes
@pytest.mark.parametrize("group", GROUPS)
def test_rows_pass_on_a_cpu(tmp_path: Path, group: str) -> None:
    rows = [row(name) for name in dict.fromkeys(["reference", *GROUPS[group]])]
    results = command.run([each for each in rows if not each["gpus"]], PLAN, tmp_path)
    assert {each["name"]: each["text"] for each in results if each["status"] != "pass"} == {}
    found = {each["name"]: each["numbers"] for each in results}
    assert found["reference"]["mean change by the update"] > 0.1  # else no update could be wrong
    for name, numbers in found.items():
        assert numbers.get("error", 0.0) < (0.5 if "16" in name else 1e-4), name
        assert numbers.get("error of the old weights", 1.0) > 0.5, name


def test_every_row_is_tested_or_needs_more_than_a_cpu() -> None:
    tested = {name for group in GROUPS.values() for name in group}
    others = {name for name in TABLE if row(name)["ranks"] > 2 or row(name)["server"] == "sglang"}
    assert tested | others == TABLE.keys()


@pytest.mark.processes
def test_report_has_host_counts_rows_and_the_rows_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TABLE | {"planted": {"run": "tests.ext.machine.machine_faults:above_its_bound"}}
    monkeypatch.setattr(command, "read_toml", lambda *_: table)
    out, names = (
        tmp_path / "new" / "machine.json",
        ["resume/1 rank to 1", "all-reduce/4", "planted"],
    )
    code = check_command.main(["--machine", "--quick", "--only", *names, "--out", str(out)])
    report = json.loads(out.read_text())
    assert (code, report["counts"]) == (1, {"pass": 3, "FAIL": 1, "n/a": 1})
    assert report["host"]["torch"] and report["quick"] is True
    texts = {each["name"]: each["text"] for each in report["rows"]}
    assert texts["resume/1 rank to 1"] == "error 0"
    assert texts["all-reduce/4 ranks"] == "left out by --quick"


def test_only_keeps_the_rows_that_the_chosen_rows_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list[str]()

    def run(rows: list[command.PlannedCheck], *_: object) -> list[command.PlannedCheck]:
        chosen[:] = [each["name"] for each in rows]
        return []

    monkeypatch.setattr(command, "run", run)
    expected = {
        "train/padded/float32": ["reference"],
        "resume/2 ranks to 1": ["reference", "checkpoint/2 ranks"],
        "reference": [],
    }
    for name, needed in expected.items():
        command.main(["--only", name, "--out", str(tmp_path / "machine.json")])
        assert chosen == [*needed, name]


@pytest.mark.processes
def test_row_that_crashes_fails_alone_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("killed", "above_its_bound", "not_a_number", "server_that_exits", "good")
    rows = [planted(name) for name in names]
    rows.append(planted("raising_on_rank_1", ranks=2))
    found = {each["name"]: each for each in command.run(rows, PLAN, tmp_path)}
    statuses = {name: each["status"] for name, each in found.items()}
    assert statuses == dict.fromkeys(statuses, "FAIL") | {"good": "pass"}
    assert found["killed"]["text"] == "process 0 terminated with signal SIGKILL"
    assert found["killed"]["logs"]["0.log"] == "last words"
    assert "number is 3, the bound is 2" in found["above_its_bound"]["text"]
    assert "number is nan, the bound is 2" in found["not_a_number"]["text"]
    assert found["raising_on_rank_1"]["text"] == "ValueError: planted"
    assert found["server_that_exits"]["text"].endswith("RoleError: the server exited")
    assert "SIGKILL" in capsys.readouterr().out


@pytest.mark.processes
def test_row_that_hangs_fails_after_its_limit(tmp_path: Path) -> None:
    (found,) = command.run([planted("hanging")], PLAN | {"limit_s": 0.1}, tmp_path)
    assert (found["status"], found["text"]) == ("FAIL", "no result after 0.1 s")


@pytest.mark.processes
def test_wrong_logprobs_and_gradients_fail_their_row(tmp_path: Path) -> None:
    command.run([row("reference")], PLAN, tmp_path)
    path = tmp_path / "window.npz"
    right = dict(np.load(path))
    for name, expected in {"before": "error is", "after": "error after the update is"}.items():
        np.savez(path, **right | {name: right[name] + 0.01})
        (found,) = command.run([row("train/padded/float32")], PLAN, tmp_path)
        assert found["status"] == "FAIL" and found["text"].startswith(expected)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_rows_without_their_gpus_or_server_name_what_is_missing(gpus: int) -> None:
    rows = [row(name) for name in TABLE]
    command.explain_missing(rows, PLAN | {"gpus": gpus, "quick": False})
    missing = {each["name"]: each["text"] for each in rows if "status" in each}
    assert "/no/python cannot run SGLang" in missing.pop("publish/disk/sglang")
    expected = {name: TABLE[name].get("gpus", 0) for name in TABLE}
    expected = {name: count for name, count in expected.items() if count > gpus}
    assert {name for name in missing if "sglang" not in name} == expected.keys()
    for name, count in expected.items():
        assert missing[name] == f"GPUs: needs {count}, found {gpus}"


def test_unknown_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--only warp: no row has such a name"):
        command.main(["--only", "warp", "--out", str(tmp_path / "machine.json")])


def test_folder_of_the_report_must_be_writable() -> None:
    with pytest.raises(UserError, match="--out"):
        command.main(["--out", "/proc/none/machine.json"])


def test_folder_as_the_report_is_refused_before_a_row_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--out {tmp_path} is a folder. Give the file"):
        command.main(["--out", str(tmp_path)])


def test_machine_and_model_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--machine and --model exclude each other"):
        check_command.main(["--model", "--machine"])
