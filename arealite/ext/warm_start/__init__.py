"""Starts the roles of a run from one parent that has imported their modules."""
