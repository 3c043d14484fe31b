"""Programming tasks: programs run in a sandbox on test cases that they cannot read."""
