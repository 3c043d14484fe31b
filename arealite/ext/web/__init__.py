"""Tasks on web pages, in a real browser."""
