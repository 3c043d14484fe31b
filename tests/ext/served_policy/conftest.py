from tests.impl.engine.conftest import group as group
