"""How workers and ranks reach the datapipe."""
