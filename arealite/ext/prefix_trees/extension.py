"""Prefix trees as an extension of the engine, behind the option `layout`."""

from arealite.api.engine_extension import EngineExtension, EngineSetup
from arealite.base.errors import UserError

LOW_PRECISION = ("bfloat16", "float16")
"""Values of the option `dtype` with which packed rows are fast on CUDA."""


def prefix_trees(setup: EngineSetup) -> EngineExtension | None:
    """Return what packs rows; None if `layout` pads them (hook `engine_extension`).

    `auto` packs on a CPU and in 16 bits on CUDA, where packing is fast, if the model supports it.
    """
    layout = setup.config.layout
    is_fast = setup.device.type == "cpu" or setup.config.dtype in LOW_PRECISION
    if layout == "packed" or (layout == "auto" and is_fast):
        return PrefixTrees(setup)
    return None


class PrefixTrees(EngineExtension):
    """Packs the rows of a model that supports it."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup

    def change_layers(self) -> None:
        """Set layout and attention of a model that can be packed.

        Raises:
            UserError: The model cannot be packed, but `layout` is packed.
        """
        from arealite.ext.prefix_trees import attention
        from arealite.ext.prefix_trees.packed_rows import PackedRows

        module = self._setup.module
        try:
            attention.check_packable(module)
        except UserError:
            if self._setup.config.layout == "packed":
                raise
            return
        module.set_attn_implementation(attention.NAME)
        self.layout = PackedRows(self._setup.device)
