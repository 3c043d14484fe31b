"""Environments in other processes, on other hosts, and in containers."""
