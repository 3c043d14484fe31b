"""Weight publishers: how a new policy version reaches the servers."""
