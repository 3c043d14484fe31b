"""Clients of language-model servers."""
