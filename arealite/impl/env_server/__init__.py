"""`arealite serve`: environments for other processes."""
