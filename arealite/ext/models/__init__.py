"""Training of special models: LoRA, mixtures of experts, long contexts, trees of prefixes."""
