"""Trains a run again from its ledger, and compares each step."""
