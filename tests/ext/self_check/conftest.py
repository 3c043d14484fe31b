from tests.impl.engine.conftest import group

__all__ = ["group"]
