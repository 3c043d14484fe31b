"""Invalid input of each command: one line that names the fix, exit code 2, and no process.

Commands run in this process, so that the whole table takes seconds; the last test runs some of
them as real processes.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest

from arealite.base import log
from arealite.cli import main as cli
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROW = '{"prompt": "1+1=", "ground_truth": "2"}\n'
TRAIN = (
    "train --dry-run model.path={made}/model dataset.train={made}/good.jsonl "
    "launcher.llm_servers=1 trainer.ppo.batch_size=16 "
    "trainer.ppo.collector.sampling.max_new_tokens=8 "
    "cluster.run_root={made}/runs cluster.name_root={made}/names"
)
SERVE_LLM = "serve-llm model.path={made}/model cluster.name_root={made}/names"
EVAL = TRAIN.replace("train --dry-run", "eval") + " dataset.eval={made}/good.jsonl"
COLLECT = TRAIN.replace("train --dry-run", "collect") + " out={made}/out.jsonl"


def nested(levels: int) -> str:
    """Return a row whose extra_info has `levels` levels."""
    inner = "[" * (levels - 2) + "]" * (levels - 2)
    return ROW.replace("}", f', "extra_info": {{"a": {inner}}}}}')


FILES: dict[str, str | bytes] = {
    "good.jsonl": ROW * 40,
    "deep.jsonl": ROW * 40 + nested(3000),
    "deep_for_a_stack.jsonl": ROW * 40 + nested(400),
    "hundred.jsonl": ROW * 40 + nested(100),
    "big_number.jsonl": ROW * 2 + f'{{"prompt": "1", "extra_info": {{"a": {2**64}}}}}',
    "gzip.jsonl": gzip.compress(ROW.encode()),
    "crlf.jsonl": (ROW * 40).replace("\n", "\r\n"),
    "utf16.jsonl": ROW.encode("utf-16"),
    "nul.jsonl": bytes(4096),
    "binary.jsonl": bytes(range(256)),
    "cut.jsonl": ROW + ROW[:-8],
    "list.jsonl": f"[{ROW.strip()}]",
    "empty.jsonl": "",
    "no_truth.jsonl": "\n" + ROW * 30 + '{"prompt": "1="}\n',
    "garbage.parquet": b"PAR1 and so on PAR1",
    "utf16.yaml": "seed: 1\n".encode("utf-16"),
    "binary.yaml": bytes(range(256)),
    "nul.yaml": "seed: 1\0\n",
    "list.yaml": "- seed\n",
    "twice.yaml": "seed: 1\nseed: 2\n",
    "bomb.yaml": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")),
    "deep.yaml": "seed: " + "[" * 3000 + "]" * 3000,
    "open.yaml": "experiment_name: ${trial_name\n",
    "a_file": "x",
    "ends.py": "import sys\nsys.exit(3)\n",
    "not_a_ledger/ledger.sqlite": b"SQLite format 3\0" + b"\1" * 4096,
    "no_tables/ledger.sqlite": b"",
    "not_a_run/config.yaml": "cluster: {}\n",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a model and all invalid files; one port of this host is in use."""
    folder = tmp_path_factory.mktemp("made")
    tiny_model(folder / "model")
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    for suffix in ("jsonl", "yaml"):
        os.mkfifo(folder / f"fifo.{suffix}")
        (folder / f"zero.{suffix}").symlink_to("/dev/zero")
        (folder / f"loop.{suffix}").symlink_to(f"loop.{suffix}")
        (folder / f"folder.{suffix}").mkdir()
    (folder / "fifo_run").mkdir()
    os.mkfifo(folder / "fifo_run/ledger.sqlite")
    with socket.create_server(("127.0.0.1", 0)) as used:
        (folder / "used").write_text(str(used.getsockname()[1]))
        yield folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse new processes, and undo changes that a command makes to this process."""

    def start(*words: Any, **_: Any) -> NoReturn:
        raise AssertionError(f"a process was started: {words}")

    async def start_async(*words: Any, **_: Any) -> NoReturn:
        start(*words)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_async)
    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(log, "setup", lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def words_of(made: Path, *templates: str) -> list[str]:
    """Fill a command's templates with the folder and port of this session; ~ is a space."""
    port = (made / "used").read_text()
    filled = " ".join(templates).replace("{made}", str(made)).replace("{used}", port)
    return [word.replace("~", " ") for word in filled.split()]


def test_command_of_the_table_passes_without_its_invalid_argument(
    made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for extra in ("dataset.eval={made}/hundred.jsonl", "dataset.eval={made}/crlf.jsonl"):
        assert cli.main(words_of(made, TRAIN, extra)) == 0
    assert "all checks passed" in capfd.readouterr().out


DATA = [
    ("deep.jsonl", "deep.jsonl, line 41: not a JSON object: maximum recursion depth"),
    ("deep_for_a_stack.jsonl", "line 41: not a JSON object: nested deeper than 100 levels"),
    ("big_number.jsonl", "line 3: column `extra_info.a` has the type int: 18446744073709551616"),
    ("gzip.jsonl", "gzip.jsonl, line 1: not a JSON object"),
    ("utf16.jsonl", "utf16.jsonl is in UTF-16 or UTF-32, and must be in UTF-8"),
    ("nul.jsonl", "nul.jsonl, line 1: not a JSON object"),
    ("binary.jsonl", "binary.jsonl, line 1: not a JSON object"),
    ("cut.jsonl", "cut.jsonl, line 2: not a JSON object"),
    ("list.jsonl", "list.jsonl, line 1: not a JSON object: Expected `object`"),
    ("empty.jsonl", "empty.jsonl has no rows. Write at least one"),
    ("no_truth.jsonl", "no_truth.jsonl, line 32: environment math cannot read it"),
    ("garbage.parquet", "garbage.parquet is not readable Parquet"),
    ("fifo.jsonl", "fifo.jsonl does not exist or is not a regular file. Set dataset."),
    ("zero.jsonl", "zero.jsonl does not exist or is not a regular file. Set dataset."),
    ("loop.jsonl", "loop.jsonl does not exist or is not a regular file. Set dataset."),
    ("folder.jsonl", "folder.jsonl does not exist or is not a regular file. Set dataset."),
    ("n" * 300 + ".jsonl", "does not exist or is not a regular file. Set dataset."),
    ("a_file", "Unknown dataset suffix ''. Known: .jsonl, .json, .csv, .parquet."),
]
CONFIGS = [
    ("utf16.yaml", "utf16.yaml is not readable YAML"),
    ("binary.yaml", "binary.yaml is not readable YAML"),
    ("nul.yaml", "nul.yaml is not readable YAML"),
    ("list.yaml", "list.yaml must hold `key: value` pairs"),
    ("twice.yaml", "found duplicate key seed"),
    ("bomb.yaml", "bomb.yaml is not readable YAML: YAML node expansion"),
    ("deep.yaml", "deep.yaml is not readable YAML: ", " maximum ", " depth"),
    ("open.yaml", "open.yaml is not readable YAML: no viable alternative"),
    ("fifo.yaml", "fifo.yaml does not exist or is not a regular file. Name another with --config."),
    ("zero.yaml", "zero.yaml does not exist or is not a regular file. Name another with --config."),
    ("loop.yaml", "loop.yaml does not exist or is not a regular file. Name another with --config."),
    ("folder.yaml", "folder.yaml does not exist or is not a regular file. Name another"),
]
OVERRIDES = [
    ("model.path=", "Write model.path=VALUE, or remove it; model.path='\"\"' is an empty text."),
    ("dataset.train=", "dataset.train has no value. Write"),
    ("seed=", "seed has no value. Write"),
    ("imports=", "imports has no value. Write"),
    ("trainer.ppo.lr=", "trainer.ppo.lr has no value. Write"),
    ("imports=[{made}/ends.py]", "ends.py]: importing it raised SystemExit: 3"),
    ("trial_name=a/b", "trial_name='a/b': use letters"),
    ("trial_name=..", "trial_name='..': use letters"),
    ("trial_name=a~b", "trial_name='a b': use letters"),
    ("trial_name=" + "n" * 300, "use letters, digits, '_', '-' and '.', up to 200."),
    ("trial_name=\x1b[31m", "the override cannot be parsed. As a text in a shell:"),
    ("cluster.user=../..", "cluster.user='../..': use letters"),
    ("cluster.name_root={made}/a_file", "Not a directory. Set cluster.name_root to a folder"),
    ("cluster.name_root={made}/a_file/x", "a_file/x/", "Not a directory. Set cluster.name_root"),
    (
        "cluster.name_root=/proc/x",
        "/proc/x/",
        "Set cluster.name_root to a folder that is writable.",
    ),
    ("cluster.name_root={made}/" + "n" * 300, "File name too long. Set cluster.name_root"),
    ("cluster.run_root={made}/fifo.yaml", "Not a directory. Set cluster.run_root"),
    ("cluster.host=999.9.9.9", "cluster.host=999.9.9.9: cannot listen", "Use one of this machine"),
    ("cluster.host=no-such-host.invalid", "cluster.host=no-such-host.invalid: cannot listen"),
    ("cluster.host=192.0.2.1", "cluster.host=192.0.2.1: cannot listen", "Use one of this"),
    ("cluster.host=..", "cluster.host=..: cannot listen"),
    (
        "trainer.ppo.publisher.type=distributed trainer.ppo.publisher.distributed.port={used}",
        "trainer.ppo.publisher.distributed.port={used}: cannot listen",
    ),
    ("launcher.server_args=[llm_server.port={used}]", "llm_server.port={used}: cannot listen"),
    (
        "view.web=true view.port={used}",
        "view.port={used}: cannot listen on 127.0.0.1:",
        "0 for a free",
    ),
    ("view.port=65536", "view.port=65536 must be at least 0 and at most 65535."),
    ("launcher.server_args=[llm_server.host=256.1.1.1]", "llm_server.host=256.1.1.1: cannot"),
    ("launcher.server_args=[llm_server.port=65536]", "llm_server.port=65536 must be at least 0"),
    ("launcher.server_args=[llm_server.type=nope]", "Unknown llm_server type 'nope'"),
    (
        "trainer.ppo.collector.env.runtime.type=nope",
        "Unknown runtime type 'nope'.",
        "Known: docker, in_process, remote, subprocess.",
    ),
    (
        "launcher.llm_servers=2 launcher.server_args=[llm_server.port=31000]",
        "llm_server.port=31000 is one port for 2 servers. Remove it",
    ),
]
NUMBERS = [
    ("trainer.ppo.reward.scale=1e308", "a number of at least -1000000000 and at most 1000000000."),
    ("trainer.ppo.reward.bias=-1e308", "a number of at least -1000000000"),
    ("trainer.ppo.reward.clip=1e308", "a number of at least -1000000000"),
    ("trainer.ppo.reward.scale=inf", "trainer.ppo.reward.scale=inf must be a number."),
    ("trainer.ppo.optimizer.beta1=nan", "must be a number of at least 0 and below 1."),
    ("trainer.ppo.optimizer.beta1=1", "must be a number of at least 0 and below 1."),
    ("trainer.ppo.optimizer.eps=0", "must be a number above 0."),
    ("trainer.ppo.optimizer.weight_decay=inf", "must be a number of at least 0."),
    ("trainer.ppo.collector.env.tic_tac_toe.win_reward=nan", "must be a number"),
    ("trainer.ppo.collector.env.math.levels=[1,9223372036854775808]", "at most 1000000000."),
    ("server_wait_s=nan", "server_wait_s=nan must be a number of at least 0."),
    ("datapipe.commit_interval_s=inf", "must be a number of at least 0."),
    ("trainer.ppo.engine.fsdp.max_tokens_per_microbatch=0", "must be at least 1."),
    ("trainer.ppo.publisher.distributed.port=65536", "must be at least 0 and at most 65535."),
    ("launcher.rollout_workers=-1", "launcher.rollout_workers=-1 must be at least 1."),
    ("launcher.rollout_workers=9223372036854775808", "at least 1 and at most 1000000000."),
    ("seed=9223372036854775808", "and at most 9223372036854775807."),
    ("trainer.ppo.total_steps=1.5", "could not be converted to Integer."),
    ("trainer.ppo.loss.reduction=mean", "Invalid value 'mean', expected one of ['token_mean'"),
    ("trainer.ppo.optimizer.schedule=step", "Invalid value 'step', expected one of ['constant'"),
    ("trainer.ppo.advantage.type=x", "Unknown advantage type 'x'. Known: dr_grpo, gae, grpo"),
]
DOORS = [
    (SERVE_LLM + " llm_server.port={used}", "llm_server.port={used}: cannot listen on 127.0.0.1:"),
    (SERVE_LLM + " llm_server.port=-1", "llm_server.port=-1 must be at least 0"),
    (SERVE_LLM + " llm_server.host=256.1.1.1", "llm_server.host=256.1.1.1: cannot listen"),
    (SERVE_LLM + " model.path=", "model.path has no value"),
    (SERVE_LLM + " cluster.name_root={made}/a_file", "Set cluster.name_root to a folder"),
    (SERVE_LLM + " trial_name=../x", "trial_name='../x': use letters"),
    (SERVE_LLM + " --config {made}/fifo.yaml", "Name another with --config."),
    ("check --config {made}/folder.yaml", "Name another with --config."),
    (EVAL + " dataset.eval={made}/deep.jsonl", "deep.jsonl, line 41: not a JSON object"),
    (EVAL + " cluster.name_root={made}/a_file", "Set cluster.name_root to a folder"),
    (EVAL + " name=a/b", "name='a/b': use letters"),
    (EVAL + " n=-1", "n=-1 must be at least 1."),
    (COLLECT + " out={made}/folder.jsonl", "or its parent folder does not exist. Name a file."),
    (COLLECT + " out=/proc/x.jsonl", "folder /proc cannot be written"),
    (COLLECT + " out=", "out is not set. Set out=PATH"),
    ("audit {made}/not_a_ledger", "ledger.sqlite cannot be read as a ledger"),
    ("audit {made}/fifo_run", "no ledger at {made}/fifo_run/ledger.sqlite. Name a run folder"),
    ("audit {made}/a_file", "a_file cannot be read as a ledger"),
    ("replay {made}/not_a_ledger", "cannot be read as a ledger: file is not a database"),
    ("replay {made}/no_tables", "cannot be read as a ledger: no such table"),
    ("replay {made}/fifo_run", "no ledger at {made}/fifo_run/ledger.sqlite. Name a run folder"),
    ("report {made}/a_file", "a_file is no run. Name its folder"),
    ("report {made}/not_a_run --out {made}", "Name another file with --out."),
    ("why {made}/not_a_run", "not_a_run/config.yaml is no config of a run"),
    ("top --once {made}/not_a_run", "not_a_run is no run"),
    ("export {made}/not_a_run", "no valid checkpoint in"),
    ("play tic_tac_toe --task {made}/fifo.jsonl", "is not a regular file"),
    ("play ../x", "Unknown env type '../x'"),
    ("launch slurm --config {made}/list.yaml", "must hold `key: value` pairs"),
    ("launch mars", "usage: arealite launch slurm|ray"),
    (TRAIN + " trainer.type=sft dataset.train={made}/not_a_ledger", "cannot be read as a ledger"),
    (TRAIN + " trainer.type=sft dataset.train={made}/deep.jsonl", "deep.jsonl, line 41"),
]
TABLE = [
    *((f"{TRAIN} dataset.train={{made}}/{name}", says) for name, says in DATA),
    (TRAIN + " dataset.eval={made}/deep.jsonl", "deep.jsonl, line 41: not a JSON object"),
    (TRAIN + " dataset.eval={made}/no_truth.jsonl", "no_truth.jsonl, line 32: environment math"),
    *((f"{TRAIN} --config {{made}}/{name}", *says) for name, *says in CONFIGS),
    *((f"{TRAIN} {word}", *says) for word, *says in OVERRIDES),
    *((f"{TRAIN} {word}", says) for word, says in NUMBERS),
    *DOORS,
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("command", "says"), [(row[0], row[1:]) for row in TABLE], ids=[row[0][-60:] for row in TABLE]
)
def test_invalid_input_is_a_one_line_error_with_the_fix_before_any_process_starts(
    made: Path, capfd: pytest.CaptureFixture[str], command: str, says: tuple[str, ...]
) -> None:
    code = cli.main(words_of(made, command))
    shown = capfd.readouterr().err
    assert code == 2, shown
    assert shown.startswith("error: ")
    assert len(shown.splitlines()) == 1, shown
    for words in says:
        assert " ".join(words_of(made, words)) in shown
    assert not (made / "runs").exists()
    assert not (made / "names").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train.py", *TRAIN.split()[2:], "dataset.train={made}/deep.jsonl"], "line 41"),
        (["train.py", *TRAIN.split()[2:], "cluster.host=999.9.9.9"], "cluster.host=999.9.9.9"),
        (
            ["arealite/launch_llm_server.py", *SERVE_LLM.split()[1:], "llm_server.port={used}"],
            "in use",
        ),
        (["-m", "arealite.cli.main", "serve", "server.port={used}"], "server.port={used}: cannot"),
    ],
    ids=["train.py, a row", "train.py, a host", "launch_llm_server, a port", "serve, a port"],
)
def test_invalid_input_of_a_real_command_exits_with_2(
    made: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], says: str
) -> None:
    monkeypatch.undo()  # this test starts processes
    words = [sys.executable, *words_of(made, *command)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert " ".join(words_of(made, says)) in ended.stderr
    assert not (made / "runs").exists()
    assert not (made / "names").exists()
