"""Proves for each version that servers generate from the weights that the trainer sent."""
