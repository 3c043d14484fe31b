"""Layer 2: the mathematics of reinforcement learning, as pure functions without I/O."""
