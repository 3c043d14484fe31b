"""Launchers for Slurm, Ray and torchrun."""
