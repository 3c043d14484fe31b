"""Format 4, of version 0.2.0: a payload is a list of whole segments."""

import sqlite3
from functools import partial

from arealite.ext.older_runs.segments import decode_old, stored_turns

VIEW = """
CREATE TEMP VIEW payloads AS
SELECT trajectory_id, X'' AS prompt_tokens, turns_of(trajectory_id, payload, payload_sum) AS turns
FROM main.trajectories"""


def create_view(db: sqlite3.Connection) -> None:
    """Create the view `payloads` of a ledger of format 4 (hook `ledger_format`)."""
    turns_of = partial(stored_turns, read_segments=decode_old)
    db.create_function("turns_of", 3, turns_of, deterministic=True)
    db.execute(VIEW)
