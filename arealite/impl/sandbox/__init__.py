"""Sandboxes: programs that nobody trusts, run with limits."""
