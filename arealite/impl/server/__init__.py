"""Language-model servers."""
