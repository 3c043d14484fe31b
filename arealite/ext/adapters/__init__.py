"""Adapters: environments of other packages and servers as an `Env`."""
