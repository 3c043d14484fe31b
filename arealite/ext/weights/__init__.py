"""Weights on their way to servers, and their comparison; shared by other extensions."""
