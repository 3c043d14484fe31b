"""`arealite check --machine`: the acceptance test of a machine."""
