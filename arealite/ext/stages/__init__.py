"""Several runs of one command, one after the other."""
