"""Pages to act on, in a real browser."""
