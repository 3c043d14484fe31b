"""Trainers without rollouts: SFT, DPO and reward models."""
