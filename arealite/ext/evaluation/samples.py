"""Stores the samples of `eval` or `collect` in an SQLite file, each as soon as it is finished.

An interrupted command resumes from this file and generates no sample twice.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Failure
from arealite.api.trajectory import TrajectoryHeader
from arealite.base.errors import UserError
from arealite.system.ledger.ledger import connect
from arealite.system.ledger.schema import SCHEMA_VERSION

SCHEMA = Path(__file__).with_suffix(".sql").read_text("utf-8")
SHOWN = 80
"""Maximum length of a value in an error, in characters."""
encode = msgspec.msgpack.encode
headers_of = msgspec.msgpack.Decoder(list[TrajectoryHeader]).decode
payloads_of = msgspec.msgpack.Decoder(list[Payload]).decode


class Samples:
    """Finished episodes by (task, member), and the number of failed attempts by failure class."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._db = connect(file)
        self._db.executescript(SCHEMA)
        self._lock = threading.Lock()
        """Held by the writing thread: a write continues after its caller is cancelled."""

    def begin(self, identity: Mapping[str, str]) -> None:
        """Store the names and values that all samples share, or compare them with the stored ones.

        Raises:
            UserError: the file has samples of another model, config or dataset.
        """
        meta_rows = self._db.execute("SELECT key, value FROM meta")
        stored = dict(meta_rows.fetchall())
        identity = {"format": SCHEMA_VERSION, **identity}
        if stored and "format" not in stored:
            raise UserError(
                f"{self.file.parent} was started with an older version of AReaLite. "
                "Choose another name=…"
            )
        for key, now in identity.items():
            before = stored.get(key, now)
            if before == now:
                continue
            difference = f"with another {key}"
            longest = max(len(before), len(now))
            if longest <= SHOWN:
                difference = f"with {key}={before}, now it is {now}"
            raise UserError(
                f"{self.file.parent} was started {difference}. Restore it, or choose another name=…"
            )
        self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", identity.items())

    def done(self) -> set[tuple[int, int]]:
        """Return (task, member) of each finished sample."""
        return {*self._db.execute("SELECT task, member FROM samples")}

    async def add(
        self,
        task: int,
        episode: Episode,
        payloads: list[Payload],
    ) -> None:
        """Store a finished episode; return when it is durable."""
        row = (
            task,
            episode.member,
            encode(episode.headers),
            encode(payloads),
        )
        sql = "INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?)"
        await asyncio.to_thread(self._write, sql, row)

    async def fail(self, failure: Failure) -> None:
        """Count a failed attempt; return when the count is durable."""
        sql = "INSERT INTO failures VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1"
        row = (failure.failure_class, failure.detail)
        await asyncio.to_thread(self._write, sql, row)

    def _write(self, sql: str, row: tuple[object, ...]) -> None:
        with self._lock:
            self._db.execute(sql, row)  # one statement is one transaction

    def failures(self) -> dict[str, tuple[int, str]]:
        """Return, by failure class, the number of failed attempts and the first one's detail."""
        rows = self._db.execute("SELECT kind, count, detail FROM failures ORDER BY count DESC")
        return {kind: (count, detail) for kind, count, detail in rows}

    def headers(self) -> Iterator[tuple[int, int, list[TrajectoryHeader]]]:
        """Yield (task, member, headers) of each sample, ordered by task and member."""
        sql = "SELECT task, member, headers FROM samples ORDER BY task, member"
        for task, member, headers in self._db.execute(sql):
            yield task, member, headers_of(headers)

    def payloads(self, task: int, member: int) -> list[Payload]:
        """Return the payloads of a sample, one for each header."""
        sql = "SELECT payloads FROM samples WHERE task = ? AND member = ?"
        sample_rows = self._db.execute(sql, (task, member))
        (encoded,) = sample_rows.fetchone()
        return payloads_of(encoded)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
