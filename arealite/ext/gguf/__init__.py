"""Reads models in the format GGUF."""
