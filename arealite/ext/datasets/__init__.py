"""Reads datasets of other libraries."""
