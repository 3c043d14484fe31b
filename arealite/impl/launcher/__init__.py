"""Launchers: how a run's processes come up and are watched."""
