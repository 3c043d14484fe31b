"""Tools that agents call in env.type=tools, and the Toolbox that calls them."""
