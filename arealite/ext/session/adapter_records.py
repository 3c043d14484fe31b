"""What a session knows of each adapter."""

from dataclasses import dataclass

from arealite.api.engine_config import OptimizerConfig


@dataclass(eq=False, kw_only=True)
class AdapterRecord:
    """The versions of one adapter, or of the default weights."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Options of its optimizer, if it is trained."""
    is_trained: bool = True
    """Whether this session trains it; False: servers have it from a folder (`Session.serve`)."""
    version: int = 0
    """That of the newest `publish`."""
    confirmed: int = 0
    """Oldest version that may sample: all servers in traffic hold it, or the first version."""
