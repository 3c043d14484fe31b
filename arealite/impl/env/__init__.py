"""Environments: mathematics, code, tools, debates, games, web pages and adapters."""
