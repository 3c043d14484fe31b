"""Finds the roles that block a run, and kills unresponsive ones."""
