"""Commands around a run: export, presets, secret."""
