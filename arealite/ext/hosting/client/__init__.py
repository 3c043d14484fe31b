"""Environments outside the rollout worker: servers, sessions and child processes."""
