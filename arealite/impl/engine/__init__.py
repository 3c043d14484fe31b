"""Training engines: one model and its shards."""
