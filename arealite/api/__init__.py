"""Floor 1: what the parts are: abstract classes, their tables, configs and messages.

Imports neither torch, sglang, aiohttp nor zmq, so that every command starts fast and every role
can load it.
"""
