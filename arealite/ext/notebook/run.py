"""A run as a Python object: its progress, its result, and each of its trajectories."""

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from arealite.api.agent import load_tokenizer
from arealite.api.payloads import Payload
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.ext.evaluation.collect import columns
from arealite.ext.notebook.command_line import RunningCommand
from arealite.ext.view.report import model_folders, write_report
from arealite.ext.view.report_run import by_step
from arealite.ext.view.snapshot import MetricsReader, RunReader
from arealite.impl.logger.metrics_file import MetricsLine
from arealite.system.ledger.ledger import decode_header, open_read_only, read_any_format

SHOWN = {
    "reward": "reward/mean",
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "staleness": "staleness/mean",
    "tokens_per_s": "throughput/trained_tokens_per_s",
}
"""The metrics of `Run.progress`."""
STATES = {"exit code 0": "finished", "exit code 130": "stopped"}
"""State of a run by the begin of its end.txt; of all others: failed."""
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a run that was stopped."""
SELECT = """
SELECT g.step + 1 AS trained_step, state, header, prompt_tokens, turns
FROM groups g JOIN trajectories USING (group_id) JOIN payloads USING (trajectory_id)
WHERE ? IS NULL OR g.step + 1 = ?
ORDER BY g.step IS NULL, g.step DESC, seq, member, seat LIMIT ?"""
HIDDEN = ("digest", "segment_lengths", "waits")
"""Fields of headers that are no columns of `Run.trajectories`."""


class Facts(dict[str, Any]):
    """A dict that prints as a table, in a console and in a notebook."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in self.items())

    def html(self) -> str:
        """Return the table for a notebook."""
        rows = [
            f"<tr><th>{name}</th><td>{escape(_text(value))}</td></tr>"
            for name, value in self.items()
        ]
        return f"<table>{''.join(rows)}</table>"

    _repr_html_ = html


class Run:
    """A run that `arealite.train` started, or the run of a folder.

    Args:
        folder: The run's folder, like runs/EXPERIMENT/TRIAL.

    Raises:
        UserError: The folder is not a run's.
    """

    def __init__(self, folder: str | Path, *, _command: RunningCommand | None = None) -> None:
        self.paths = RunPaths(Path(folder).expanduser().absolute())
        """The run's files: `root`, `logs`, `checkpoints`, `export` (the final model) and others."""
        self._command = _command
        self._is_stopped = False
        self._reader = None if _command else RunReader(self.paths)

    def wait(self) -> "Run":
        """Print the run's output until the run ends; return the run.

        An interrupt (Ctrl-C, or the stop button of a notebook) stops the run after its step, with a
        checkpoint, and is raised then. A second one stops the run at once.

        Raises:
            UserError: The run refused its input; or another process started it.
            ArealiteError: The run failed. The error has the folder, the last error and the log.
        """
        command = self._started()
        code = command.wait()
        was_stopped = self._is_stopped and code in STOPPED
        if code and not was_stopped:
            raise command.error(f"run {self.paths.root}")
        return self

    def stop(self) -> None:
        """Stop the run after its step, with a checkpoint; return when the run has ended.

        Raises:
            UserError: Another process started the run.
        """
        command = self._started()
        self._is_stopped = True
        command.stop(signal.SIGINT)

    def progress(self) -> Facts:
        """Return the present state, step, reward and other figures of the run."""
        state = self._state()
        folder = str(self.paths.root)
        try:
            self._reader = self._reader or RunReader(self.paths)
        except UserError:  # the config is not yet written
            return Facts(state=state, step=0, folder=folder)
        shot = self._reader.read()
        newest = shot.metrics.newest
        shown = {name: newest[key] for name, key in SHOWN.items() if key in newest}
        return Facts(
            state=state or shot.state,
            step=shot.metrics.steps,
            total_steps=shot.total_steps,
            **shown,
            failed_episodes=sum(shot.failures.values()),
            folder=folder,
        )

    @property
    def summary(self) -> Facts:
        """First and last reward, held-out result before and after, and the ledger's audit."""
        facts = self.progress()
        metrics = self.metrics()
        for name in ("reward", "loss", "accuracy"):
            for label, key in ((name, SHOWN[name]), (f"held_out_{name}", f"eval/{name}")):
                measured = [line[key] for line in metrics if key in line]
                if measured:
                    facts[f"{label}_first"] = measured[0]
                    facts[f"{label}_last"] = measured[-1]
        with suppress(UserError):  # sft, dpo and reward have no ledger
            report = audit(self.paths.ledger, new_only=True)
            facts["lost"] = len(report.lost)
            facts["repeated"] = len(report.repeated)
            facts["balanced"] = report.ok
        return facts

    def metrics(self) -> list[MetricsLine]:
        """Return the metrics of each step, and of evaluations after it, as rows of a DataFrame.

        The reference of metrics describes each name.
        """
        return by_step(MetricsReader(self.paths.metrics).poll())

    def trajectories(self, step: int | None = None, *, most: int = 1000) -> list[dict[str, Any]]:
        """Return sampled texts and tokens as rows of a DataFrame.

        A row is a segment; most trajectories have one. `prompt` is the exact text before the first
        sampled token, `completion` the sampled text without special tokens. `tokens`, `loss_mask`
        (True: sampled by the policy), `logprobs` and `versions` have an item for each token.

        Args:
            step: The step that trained them, from 1; None: of all steps, newest first.
            most: Maximum number of trajectories.

        Raises:
            UserError: The run has no ledger: no step is sampled yet, or it is sft, dpo or reward.
        """
        with open_read_only(self.paths.ledger) as db:
            read_any_format(db)
            db.row_factory = sqlite3.Row
            trajectories = db.execute(SELECT, (step, step, most)).fetchall()
        folder = next(filter(Path.is_dir, model_folders(self.paths)), None)
        tokenizer: Any = load_tokenizer(str(folder)) if folder else None
        decode = tokenizer.decode if tokenizer else _ids
        return [row for trajectory in trajectories for row in _segment_rows(trajectory, decode)]

    def report(self) -> Path:
        """Write the run's report, one HTML file with curves and every token; return its path."""
        write_report(self.paths, self.paths.report, most=10_000)
        return self.paths.report

    def __repr__(self) -> str:
        return repr(self.progress())

    def _repr_html_(self) -> str:
        return self.progress().html()

    def _started(self) -> RunningCommand:
        if self._command is None:
            raise UserError(f"another process started {self.paths.root}: stop or await it there.")
        return self._command

    def _state(self) -> str:
        """Return the state that the own process or end.txt gives; "" without both."""
        code = self._command.code if self._command else 0
        if code is None:
            return "running" if self.paths.metrics.exists() else "starting"
        if code:
            return "stopped" if code in STOPPED else "failed"
        with suppress(OSError):
            return STATES.get(self.paths.end.read_text().partition(".")[0], "failed")
        return ""


def _segment_rows(trajectory: sqlite3.Row, decode: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each segment of a row of SELECT; none if its payload was dropped."""
    if trajectory["turns"] is None:
        return
    payload = Payload(prompt=trajectory["prompt_tokens"], turns=trajectory["turns"])
    header = asdict(decode_header(trajectory["header"]))
    reward_parts = header.pop("reward_parts")
    header_columns = {name: field for name, field in header.items() if name not in HIDDEN}
    for name, reward in reward_parts.items():
        header_columns[f"reward/{name}"] = reward
    for segment in TrajectoryTree.decode(payload).segments():
        segment_columns: dict[str, Any] = columns(segment, decode)
        completion = segment_columns.pop("text")
        prompt_length = segment.loss_mask.find(1)
        yield {
            "step": trajectory["trained_step"],
            "state": trajectory["state"],
            **header_columns,
            "prompt": decode(segment_columns["tokens"][:prompt_length]),
            "completion": completion,
            **segment_columns,
        }


def _ids(tokens: list[int], **_: object) -> str:
    return str(tokens)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())  # pyright: ignore
    if isinstance(value, list):
        return f"{len(value)} rows"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
