"""Launchers start, supervise and end the processes of a run."""
