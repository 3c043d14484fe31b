"""The Python API: `arealite.train` and the other public functions, for scripts and notebooks."""
