"""Computes tokens that rows share once, in packed micro-batches."""
