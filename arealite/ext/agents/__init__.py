"""Agents for special uses: tools, reasoning, scripts and fixed policies."""
