"""Chooses tasks by the rewards of earlier groups."""
