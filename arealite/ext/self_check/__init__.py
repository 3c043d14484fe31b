"""The comparison of trainer, servers and plain transformers before the first episode of a run."""
