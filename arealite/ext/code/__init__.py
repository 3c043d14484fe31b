"""Programming tasks: programs run in a sandbox and cannot read the expected results."""
