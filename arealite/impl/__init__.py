"""Floor 4: one implementation of each abstract part, found by name through its kind's table."""
