"""Floor 5: the commands, and the only place that wires every part together."""
