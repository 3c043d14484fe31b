"""Runs episodes: the collector and the worker process around it."""
