"""Questions that are made with their answers, or come from a file."""
