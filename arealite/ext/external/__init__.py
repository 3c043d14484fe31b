"""Servers that AReaLite did not start."""
