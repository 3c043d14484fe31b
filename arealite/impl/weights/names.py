"""Maps the tensors of a Hugging Face folder to the tensors of a model, both ways.

transformers renames tensors when it loads them, and joins or splits some of them: the experts of a
layer become one parameter. `TensorNames` plans this from file headers with transformers' own rules.
One tensor can then be loaded without the others, and exports have the tensors of the folder.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from arealite.base.errors import InvariantError, UserError, one_line
from arealite.base.model_folder import read_headers
from arealite.impl.weights.buckets import Named

SCORE = "score.weight"
"""Weight of the value head, which a folder may lack."""
FIX = "Weights and config.json are of different models: download the folder again."
TIE = "If the head is tied, set tie_word_embeddings=true in config.json; else download it again."
IMAGES = "Images are not supported: use a folder with the text part of the model alone."
FLOATS = ("F16", "BF16", "F32", "F64")
Tensors = dict[str, torch.Tensor]
Read = Callable[[str], torch.Tensor]
"""Reads one tensor of the folder by name."""
Parts = dict[str, Tensors]
"""Tensors of incomplete groups: {key of the group: {name: tensor}}."""


@dataclass(eq=False)
class Group:
    """Tensors of a folder, and the tensors of the model that are made of them."""

    key: str
    """The first tensor of the model."""
    rule: Any
    """transformers' WeightConverter; None: one tensor, unchanged."""
    sources: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Maps a name in the folder to (name after all renamings, pattern of the rule)."""
    targets: tuple[str, ...] = ()


class TensorNames:
    """Maps the tensors of a Hugging Face folder to the tensors of a model, both ways.

    Every tensor of the model has a tensor in the folder, except a fresh value head, and every
    tensor of the folder is used, except those that transformers ignores.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        """Read the headers of the folder's files.

        Args:
            model: Without adapters. The parameters may be on the meta device.
            folder: Has safetensors files.

        Raises:
            UserError: A tensor of one side has no counterpart, or another shape.
        """
        self.folder = folder
        state: Tensors = model.state_dict(keep_vars=True)
        first = {id(state[name]): name for name in reversed(state)}
        self._first = {name: first[id(tensor)] for name, tensor in state.items()}
        """Maps tied tensors of the model to the first of them."""
        self._meta = {name: tensor.detach().to("meta") for name, tensor in state.items()}
        self._config = model.config
        self._prefix = f"{model.base_model_prefix}."
        self._check_ties(model)
        self.headers = read_headers(folder)
        if not self.headers:
            raise UserError(f"'{folder}' has no tensors in safetensors files. Use save_pretrained.")
        self._of_model: dict[str, Group] = {}
        self._twins: dict[str, Group] = {}
        """The second group of a tensor that has two, as of an embedding with a tied head."""
        # A head that is tied to the embedding comes second: servers ignore it.
        for group in sorted(self._plan(model), key=lambda each: self._first[each.key] != each.key):
            self._add(group)
        groups = [*self._twins.values(), *self._of_model.values()]
        self._of_folder = {name: group for group in groups for name in group.sources}
        self._check_names(model)
        self.unused = frozenset(self.headers.keys() - self._of_folder.keys())
        """Tensors of the folder that the model ignores, for example for images."""
        self._files = {name: header.file for name, header in self.headers.items()}
        self.headers = {name: self.headers[name] for name in self._of_folder}
        """Describes the tensors of the folder that the model uses."""
        self.loadable = self._of_model.keys()
        """The tensors of the model that the folder has: all but a fresh value head."""
        self._rest: Tensors = {}
        """Tensors of the last converted group that `load` has yet to return."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the folder, on the CPU, with the dtype and shape of its file."""
        # Opened for each tensor: pages of an open file count as this process's memory.
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def load(self, name: str) -> torch.Tensor:
        """Return a full tensor of the model, on the CPU, converted from its tensors in the folder.

        Args:
            name: One of `loadable`.

        Raises:
            UserError: config.json ties tensors whose values differ.
        """
        if name not in self._rest:  # a group has one read for all its tensors
            self._rest = self._load_group(self._of_model[name])
        tensor = self._rest.pop(name)
        twin = self._twins.get(name)
        if twin is not None and not torch.equal(tensor, self._load_group(twin)[name]):
            raise self._untied(name, twin.key)
        return tensor

    def to_folder(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Convert the model's tensors to the names and shapes of the folder.

        A fresh value head keeps its name. If `weights` has the model's order, at most one group is
        held in memory.

        Raises:
            InvariantError: A group is incomplete.
        """
        parts: Parts = {}
        for name, tensor in weights:
            if (group := self._of_model.get(name)) is None:
                yield name, tensor
            elif found := _complete(parts, group.key, len(group.targets), name, tensor):
                yield from self._revert(group, found).items()
        if parts:
            raise InvariantError(f"{next(iter(parts))} was streamed without the rest of its group")

    def to_model(self, named: Iterable[Named], parts: Parts) -> Iterator[Named]:
        """Convert tensors of the folder to the names and shapes of the model.

        Args:
            named: Tensors whose names are in `headers`.
            parts: Tensors of incomplete groups from earlier calls; changed for the next call.
        """
        for name, tensor in named:
            group = self._of_folder[name]
            if found := _complete(parts, group.key, len(group.sources), name, tensor):
                yield from self._convert(group, found.__getitem__).items()

    def target(self, name: str) -> str:
        """Return the name of the model's first tensor that contains a tensor of the folder."""
        return self._first[self._of_folder[name].key]

    def missing(self, given: set[str], *, whole: bool = True) -> list[str]:
        """Return the names of tensors that are needed besides `given`, sorted.

        Args:
            given: Names of tensors of the folder.
            whole: True: to make the whole model; False: to complete the groups in `given`.
        """
        groups = self._of_model if whole else {self.target(n): self._of_folder[n] for n in given}
        absent: dict[str, None] = {}
        for name, group in groups.items():
            if not given.issuperset(self._twins.get(name, group).sources):
                absent |= dict.fromkeys(group.sources.keys() - given)
        return sorted(absent)

    def _plan(self, model: PreTrainedModel) -> list[Group]:
        """Group the tensors of the folder by the model's tensor that is made of them."""
        rules = get_model_conversion_mapping(model)
        joins = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        of_pattern = {pattern: rule for rule in joins for pattern in rule.source_patterns}
        prefix = model.base_model_prefix
        groups = dict[tuple[str, str], Group]()
        for name in sorted(self.headers, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, joins, prefix, self._meta)
            renamed = name
            for rule in renamings:
                renamed, _ = rule.rename_source_key(renamed)
            if key not in self._meta and name in self._meta:  # the name needs no renaming
                key = name
                pattern = None
            if key in self._meta:
                rule = of_pattern.get(pattern or "")
                group = groups.setdefault((key, "" if rule else name), Group(key, rule))
                group.sources[name] = renamed.removeprefix(self._prefix), pattern or ""
        return [*groups.values()]

    def _add(self, group: Group) -> None:
        """Add a group; check on the meta device that it can be converted to the model, and back."""
        given = {n: torch.empty(self.headers[n].shape, device="meta") for n in group.sources}
        listed = ", ".join([*given][:2]) + (f", … ({len(given)} in all)" if len(given) > 2 else "")
        what = f"'{self.folder}': {listed}"
        dtypes = {self.headers[name].dtype for name in given}
        if self._meta[group.key].is_floating_point() and (odd := dtypes - {*FLOATS}):
            what = f"{what}: dtype {odd.pop()} is quantized, which cannot be trained"
            raise UserError(f"{what}. Use a folder with weights in bfloat16 or float32.")
        try:
            made = self._convert(group, given.__getitem__)
            group.targets = tuple(made)
            again = self._revert(group, made)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            why = f"{one_line(error):.200}"
            raise UserError(f"{what} cannot be converted ({why}). {FIX}") from error
        for name, tensor in made.items():
            if tensor.shape != (shape := self._meta[name].shape):
                has = f"{what} has shape {list(tensor.shape)}"
                raise UserError(f"{has}, the model of its config.json {list(shape)}. {FIX}")
            if self._of_model.setdefault(name, group) is not group:
                self._twins[name] = group
        if any(again[name].shape != tensor.shape for name, tensor in given.items()):
            raise UserError(f"{what} cannot be converted back to their shapes. {FIX}")

    def _load_group(self, group: Group) -> Tensors:
        """Return the tensors of the model that are made of the group's tensors in the folder.

        A group may have a tensor for each expert, so its files are opened once. They do not stay
        open: pages of an open file count as this process's memory.
        """
        with ExitStack() as stack:
            opened = cache(lambda file: stack.enter_context(safe_open(file, framework="pt")))
            return self._convert(group, lambda name: opened(self._files[name]).get_tensor(name))

    def _convert(self, group: Group, read: Read) -> Tensors:
        """Return the tensors of the model that are made of the group's tensors."""
        if group.rule is None:
            (name,) = group.sources
            return {self._first[group.key]: read(name)}
        rule = deepcopy(group.rule)
        for name, (_, pattern) in group.sources.items():
            rule.add_tensor(group.key, name, pattern, read(name))
        return {self._first[name]: tensor for name, tensor in self._apply(rule, group.key).items()}

    def _revert(self, group: Group, tensors: Tensors) -> Tensors:
        """Return the tensors of the folder that the tensors of the model are made of."""
        if group.rule is None:
            return dict(zip(group.sources, tensors.values(), strict=True))
        rule = group.rule.reverse_transform()
        key = ""
        for name in group.targets:
            key, pattern = rule.rename_source_key(name)
            rule.add_tensor(key, name, pattern, tensors[name])
        made = {n.removeprefix(self._prefix): t for n, t in self._apply(rule, key).items()}
        return {name: made[renamed] for name, (renamed, _) in group.sources.items()}

    def _apply(self, rule: Any, key: str) -> Tensors:
        shapes = SimpleNamespace(get_parameter=self._meta.__getitem__)
        made = rule.convert(key, model=shapes, config=self._config).items()
        return {name: each[0] if isinstance(each, list) else each for name, each in made}

    def _check_ties(self, model: PreTrainedModel) -> None:
        """Raise UserError if tensors that config.json ties are different in the model."""
        for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if self._first[name] != self._first[other]:
                raise self._untied(other, name)

    def _untied(self, name: str, other: str) -> UserError:
        what = f"'{self.folder}': config.json ties {name} and {other}"
        fix = "Set tie_word_embeddings to false in config.json"
        return UserError(f"{what}, whose values differ in the files. {fix}, or remove one of them.")

    def _check_names(self, model: PreTrainedModel) -> None:
        """Raise UserError unless the folder holds exactly the tensors of the model."""
        unused = [*(model._keys_to_ignore_on_load_unexpected or []), r"\.inv_freq$"]
        if SCORE in self._meta:
            unused.append(r"^lm_head\.")
        for number in range(getattr(self._config, "num_nextn_predict_layers", None) or 0):
            unused.append(rf"\.layers\.{self._config.num_hidden_layers + number}\.")
        left = self.headers.keys() - self._of_folder.keys()
        left = {name for name in left if not any(re.search(rule, name) for rule in unused)}
        missing = {*self._first.values()} - self._of_model.keys() - {SCORE}
        for names, what in (missing, "lacks"), (left, "has tensors that the model lacks:"):
            if names:
                listed = ", ".join(sorted(names)[:3])
                fix = IMAGES if re.search("vision|visual", " ".join(names)) else FIX
                fix = TIE if names == {"lm_head.weight"} else fix
                raise UserError(f"'{self.folder}' {what} {listed} ({len(names)} in all). {fix}")


def _complete(parts: Parts, key: str, size: int, name: str, tensor: torch.Tensor) -> Tensors | None:
    """Add a tensor to its group; remove and return the group if it has `size` tensors now."""
    found = parts.setdefault(key, {})
    found[name] = tensor
    return parts.pop(key) if len(found) == size else None
