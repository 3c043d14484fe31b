"""Format 4, of version 0.2.0: a payload is a list of whole segments."""

import sqlite3

from arealite.ext.older_runs.segments import create_payload_view, decode_old


def create_view(db: sqlite3.Connection) -> None:
    """Create the view `payloads` of a ledger of format 4 (hook `ledger_format`)."""
    create_payload_view(db, decode_old)
