"""Reads tokenizers and chat templates without transformers, in a fraction of its time."""
