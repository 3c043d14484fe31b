"""Weights on their way from a trainer to servers."""
