"""`arealite serve`: host an environment for other processes."""
