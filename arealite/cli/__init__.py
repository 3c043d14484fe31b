"""Layer 5: the commands. They connect the parts of all layers."""
