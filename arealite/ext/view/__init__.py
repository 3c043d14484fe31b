"""The live panel and the report of a run."""
