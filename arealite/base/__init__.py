"""Layer 0: errors, config loading, registries, logging and paths; imports no other layer."""
