"""Converts tensors of a folder that arrive in any order to tensors of a loaded model."""

from collections.abc import Iterable, Iterator

from arealite.api.engine import Named
from arealite.impl.weights.tensor_names import PartialGroups, TensorNames, add_to_group


class UpdatableTensors(TensorNames):
    """The tensors of a model that are updated by the names of its folder."""

    def to_model(self, named: Iterable[Named], parts: PartialGroups) -> Iterator[Named]:
        """Convert tensors of the folder to the names and shapes of the model.

        Args:
            named: Tensors whose names are in `headers`.
            parts: Tensors of incomplete groups from earlier calls; changed for the next call.
        """
        for name, tensor in named:
            group = self._of_folder[name]
            complete_group = add_to_group(
                parts,
                key=group.key,
                size=len(group.sources),
                name=name,
                tensor=tensor,
            )
            if complete_group:
                model_tensors = self._convert(group, complete_group.__getitem__)
                yield from model_tensors.items()

    def target(self, name: str) -> str:
        """Return the name of the model's first tensor that contains a tensor of the folder."""
        group = self._of_folder[name]
        return self._first[group.key]

    def missing(self, present: set[str], *, whole: bool = True) -> list[str]:
        """Return the names of tensors that are needed besides those in `present`, sorted.

        Args:
            present: Names of tensors of the folder.
            whole: True: to make the whole model; False: to complete the groups in `present`.
        """
        groups = self._of_model
        if not whole:
            groups = {self.target(name): self._of_folder[name] for name in present}
        absent = set[str]()
        for name, group in groups.items():
            twin = self._twins.get(name, group)
            if not present.issuperset(twin.sources):
                absent |= group.sources.keys() - present
        return sorted(absent)
