"""Built-in tools, which agents call in env.type=tools."""
