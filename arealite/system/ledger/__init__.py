"""The ledger: the SQLite file that stores a trial, its writer, and its audit."""
