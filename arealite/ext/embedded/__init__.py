"""The embedded server: it samples tokens on a laptop, without SGLang."""
