"""Registry of addresses with heartbeats, and the secret of a trial."""
