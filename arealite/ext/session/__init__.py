"""The training loop as a library: sample, forward_backward, optim_step and publish."""
