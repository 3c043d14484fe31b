"""Waits between processes, and the vitals of each process."""
