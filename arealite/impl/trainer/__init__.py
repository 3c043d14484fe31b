"""Trainers: the algorithm's loop over engines and batches."""
