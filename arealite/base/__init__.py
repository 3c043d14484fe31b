"""Floor 0: errors, the registry, logging and names; imports nothing of the package."""
