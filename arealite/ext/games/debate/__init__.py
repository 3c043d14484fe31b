"""Debates: two seats argue; rules or a third seat judge."""
