"""A trial's truth in one SQLite file, the groups it keeps, and its audit."""
