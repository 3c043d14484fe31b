"""Programs to write: run in a sandbox on cases that they cannot see."""
