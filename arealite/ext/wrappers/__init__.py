"""Environments as Requests: `make`, `make_vec`, and wrappers."""
