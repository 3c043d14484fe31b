"""Agents: they turn observations into prompts, and completions into actions."""
