"""AReaLite: asynchronous reinforcement learning for language-model agents on plain asyncio."""

__version__ = "0.2.0"
