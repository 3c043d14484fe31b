"""Where environments run."""
