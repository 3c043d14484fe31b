"""Metric loggers."""
