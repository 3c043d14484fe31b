"""The process between workers and trainer: what is leased, kept and batched."""
