"""Checks the prompts of a run before it starts."""
