"""Layer 1: abstract classes, the registries of their implementations, configs and messages.

No module here imports torch, sglang, aiohttp or zmq. Commands therefore start fast, and every role
can import all of them.
"""
