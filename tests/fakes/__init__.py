"""Fake servers and clients for tests."""
