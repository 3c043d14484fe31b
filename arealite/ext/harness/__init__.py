"""Agents that are not AReaLite's: they talk to the model through the gateway."""
