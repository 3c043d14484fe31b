"""Metric loggers that need a package or a service."""
