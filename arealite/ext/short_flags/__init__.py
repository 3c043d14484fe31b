"""Short flags of commands."""
