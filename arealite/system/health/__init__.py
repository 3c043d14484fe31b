"""Waits between processes, the vitals of each process, and the diagnosis of a blocked run."""
