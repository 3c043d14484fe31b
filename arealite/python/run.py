"""A run as a Python object: its progress, its result, and each of its trajectories."""

from __future__ import annotations

import html
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.trajectory import Segment, TrajectoryHeader, decode_segments
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.impl.view.report import model_folders, write_report
from arealite.impl.view.report_text import Vocabulary, id_table
from arealite.python.process import Process
from arealite.system.health.snapshot import Line, Metrics, RunReader
from arealite.system.ledger.audit import audit
from arealite.system.ledger.ledger import decode_header, open_read_only

SHOWN = {
    "reward/mean": "reward",
    "train/loss": "loss",
    "train/accuracy": "accuracy",
    "staleness/mean": "staleness",
    "throughput/trained_tokens_per_s": "tokens_per_s",
}
"""The metrics of `Run.progress`, with their names there."""
HELD_OUT = ("reward", "loss", "accuracy")
ENDS = {"exit code 0": "finished", "exit code 130": "stopped"}
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
HEADER = (
    *("task_id", "seat", "source", "reward", "turns", "truncated", "trained_tokens"),
    *("oldest_version", "newest_version", "interruptions", "seconds"),
)
"""The fields of a trajectory's header that are columns of `Run.trajectories`."""
SELECT = """
SELECT g.step + 1, state, reason, header, payload
FROM groups g JOIN trajectories USING (group_id) WHERE ? IS NULL OR g.step + 1 = ?
ORDER BY g.step IS NULL, g.step DESC, seq, member, seat LIMIT ?"""


class Facts(dict[str, Any]):
    """A dict that prints as a table, in a console and in a notebook."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in self.items())

    def _repr_html_(self) -> str:
        cells = [(name, html.escape(_text(value))) for name, value in self.items()]
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table>{rows}</table>"


class Run:
    """A run that `arealite.train` started, or the run of a folder.

    Args:
        folder: The run's folder, like runs/EXPERIMENT/TRIAL.

    Raises:
        UserError: The folder is not a run's.
    """

    def __init__(self, folder: str | Path, *, _process: Process | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.paths = RunPaths(self.folder)
        """The run's files: logs, checkpoints, the exported model (`paths.export`) and others."""
        self._process, self._is_stopped = _process, False
        self._reader = None if _process else RunReader(self.paths)

    def wait(self) -> Run:
        """Print the run's output until the run ends; return the run.

        An interrupt (Ctrl-C, or the stop button of a notebook) stops the run after its step, with a
        checkpoint, and is raised then. A second one stops the run at once.

        Raises:
            UserError: The run refused its input; or another process started it.
            ArealiteError: The run failed. The error has the folder, the last error and the log.
        """
        process = self._own()
        code = process.wait()
        if code and not (self._is_stopped and code in STOPPED):
            raise process.error(f"run {self.folder}")
        return self

    def stop(self, *, now: bool = False) -> None:
        """Stop the run, and return when it has ended. Training again with its names resumes it.

        Args:
            now: Do not finish the step and write no checkpoint.

        Raises:
            UserError: Another process started the run.
        """
        self._is_stopped = True
        self._own().stop(signal.SIGINT, *([signal.SIGTERM] if now else []))

    def progress(self) -> Facts:
        """Return the present state, step, reward and other figures of the run."""
        state = self._state()
        try:
            self._reader = self._reader or RunReader(self.paths)
        except UserError:  # its config is not yet written
            return Facts(state=state, step=0, folder=str(self.folder))
        shot = self._reader.read()
        newest, failed = shot.metrics.newest, sum(shot.failures.values())
        found = Facts(state=state or shot.state, step=shot.metrics.steps, steps=shot.total_steps)
        found |= {name: newest[key] for key, name in SHOWN.items() if key in newest}
        return Facts(found, failed_episodes=failed, folder=str(self.folder))

    @property
    def summary(self) -> Facts:
        """First and last reward, held-out result before and after, and the ledger's audit."""
        found, metrics = self.progress(), Metrics(self.paths.metrics)
        metrics.poll()
        for key, name in [*SHOWN.items()][:2]:
            if curve := metrics.curves.get(key):
                found |= {f"first_{name}": curve[0], f"last_{name}": curve[-1]}
                found.pop(name, None)
        for name in HELD_OUT:
            key, lines = f"eval/{name}", [metrics.evals[step] for step in sorted(metrics.evals)]
            if values := [line[key] for line in lines if key in line]:
                found |= {
                    f"held_out_{name}_before": values[0],
                    f"held_out_{name}_after": values[-1],
                }
        with suppress(UserError):  # SFT, DPO and reward models have no ledger
            report = audit(self.paths.ledger, new_only=True)
            found |= {"lost": len(report.lost), "repeated": len(report.repeated)}
            found["balanced"] = report.ok
        return found

    def metrics(self) -> list[Line]:
        """Return the metrics of each step in a dict, for example for pandas.DataFrame.

        The results of a held-out evaluation are in the row of the step after which it was made.
        docs/reference/metrics.md explains each name.
        """
        rows = defaultdict[float, Line](dict)
        for line in Metrics(self.paths.metrics).poll():
            rows[line["step"]] |= line
        return [rows[step] for step in sorted(rows)]

    def trajectories(self, step: int | None = None, *, most: int = 1000) -> list[dict[str, Any]]:
        """Return trajectories with their texts and tokens, for example for pandas.DataFrame.

        `prompt` is the exact text up to the first sampled token. `completion` is the text after it,
        without special tokens. `tokens`, `loss_mask` (1: sampled by the policy), `logprobs` and
        `versions` have one item for each token.

        Args:
            step: The step that trained them, from 1; None: all, newest first.
            most: Maximum number.

        Raises:
            UserError: The run has no ledger: nothing is sampled yet, or it is sft, dpo or reward.
        """
        with open_read_only(self.paths.ledger) as db:
            found = db.execute(SELECT, (step, step, most)).fetchall()
        rows = [(*state, decode_header(h), decode_segments(p or b"\x90")) for *state, h, p in found]
        ids = {t for *_, segments in rows for s in segments for t in _array(s.tokens)}
        vocabulary = Vocabulary.find(model_folders(self.paths))
        texts = _Texts(vocabulary.table(ids) if vocabulary else id_table(ids))
        return [
            {"step": number, "state": state, "reason": reason, **_columns(header, segments, texts)}
            for number, state, reason, header, segments in rows
        ]

    def report(self) -> Path:
        """Write the run's report, one HTML file with curves and every token; return its path."""
        write_report(self.paths, self.paths.report, most=10_000)
        return self.paths.report

    def __repr__(self) -> str:
        return repr(self.progress())

    def _repr_html_(self) -> str:
        return self.progress()._repr_html_()

    def _own(self) -> Process:
        if self._process is None:
            raise UserError(f"another process started {self.folder}. Stop or await it there.")
        return self._process

    def _state(self) -> str:
        """Return the state as far as the own process and the launcher's end.txt tell it; or ""."""
        if self._process and self._process.code is None:
            return "running" if self.paths.metrics.exists() else "starting"
        if self._process and self._process.code not in (0, *STOPPED):
            return "failed"
        with suppress(OSError):
            return ENDS.get(self.paths.end.read_text().partition(".")[0], "failed")
        return "stopped" if self._process else ""


class _Texts:
    """Decodes tokens by a table of their pieces, as in a report."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._pieces: dict[int, str] = dict(zip(table["ids"], table["pieces"], strict=True))
        self._special = set[int](table.get("special", ()))

    def decode(self, tokens: list[int], *, special: bool) -> str:
        kept = [self._pieces[t] for t in tokens if special or t not in self._special]
        return b"".join(piece.encode("latin-1") for piece in kept).decode("utf-8", "replace")


def _columns(header: TrajectoryHeader, segments: list[Segment], texts: _Texts) -> dict[str, Any]:
    """Return the columns of one trajectory; empty if its payload was dropped."""
    prompt, completions = "", list[str]()
    for number, segment in enumerate(segments):
        tokens, first = _array(segment.tokens), segment.loss_mask.find(1)
        completions.append(texts.decode(tokens[first:], special=False))
        prompt = prompt if number else texts.decode(tokens[:first], special=True)
    arrays = {"tokens": "<i4", "loss_mask": "u1", "logprobs": "<f4", "versions": "<i4"}
    return {
        **{name: getattr(header, name) for name in HEADER},
        **{f"reward/{name}": value for name, value in header.reward_parts.items()},
        "prompt": prompt,
        "completion": "\n".join(completions),
        **{n: [v for s in segments for v in _array(getattr(s, n), k)] for n, k in arrays.items()},
    }


def _array(data: bytes, kind: str = "<i4") -> list[Any]:
    return np.frombuffer(data, kind).tolist()


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k or 'all'} {_text(v)}" for k, v in value.items())  # pyright: ignore
    return f"{value:.4g}" if isinstance(value, float) else str(value)
