"""Server programs as supervised processes of this host."""
