"""Floor 2: pure maths of reinforcement learning; tensors and numbers in and out, no I/O."""
