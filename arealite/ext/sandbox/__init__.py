"""Run untrusted programs with limits on files, network, memory, processes and time."""
