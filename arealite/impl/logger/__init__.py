"""Metric loggers and the catalogue of metric names."""
