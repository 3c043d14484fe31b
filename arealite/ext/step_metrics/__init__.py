"""Measures the batches that a PPO trainer has trained."""
