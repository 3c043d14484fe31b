"""Adapts the number of workers to the load."""
