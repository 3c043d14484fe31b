"""HTTP endpoints for agents that are written for the APIs of OpenAI and Anthropic."""
