"""On-policy distillation from teacher servers."""
