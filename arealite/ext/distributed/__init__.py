"""Publishes weights over a process group, from GPU to GPU, without a disk."""
