"""Maps the tensors of a Hugging Face folder to the tensors of a model, both ways.

transformers renames tensors when it loads them, and joins or splits some of them: the experts of a
layer become one parameter. `TensorNames` plans this from file headers with transformers' own rules.
One tensor can then be loaded without the others, and exports have the tensors of the folder.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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

from arealite.api.engine import Named
from arealite.base.errors import InvariantError, UserError, one_line
from arealite.base.model_folder import Header, read_headers

SCORE = "score.weight"
"""Weight of the value head, which a folder may lack."""
DOWNLOAD_AGAIN = "Weights and config.json are of different models: download the folder again."
TIE = "If the head is tied, set tie_word_embeddings=true in config.json; else download it again."
IMAGES = "Images are not supported: use a folder with the text part of the model alone."
FLOATS = ("F16", "BF16", "F32", "F64")
Tensors = dict[str, torch.Tensor]
Read = Callable[[str], torch.Tensor]
"""Reads one tensor of the folder by name."""
PartialGroups = dict[str, Tensors]
"""Tensors of incomplete groups: {key of the group: {name: tensor}}."""


@dataclass(eq=False, kw_only=True)
class TensorGroup:
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
        # Tied tensors are one object. Its first name is stored last and stays.
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
        self._of_model: dict[str, TensorGroup] = {}
        self._twins: dict[str, TensorGroup] = {}
        """The second group of a tensor that has two, as of an embedding with a tied head."""
        self._of_folder: dict[str, TensorGroup] = {}
        # A head that is tied to the embedding comes second: servers ignore it.
        groups = self._plan(model)
        for group in sorted(groups, key=self._is_tied_copy):
            self._add(group)
        for group in [*self._twins.values(), *self._of_model.values()]:
            self._of_folder |= dict.fromkeys(group.sources, group)
        self._check_names(model)
        self.unused = frozenset(self.headers.keys() - self._of_folder.keys())
        """Tensors of the folder that the model ignores, for example for images."""
        self._all_headers = self.headers
        self.headers = {name: self.headers[name] for name in self._of_folder}
        """Describes the tensors of the folder that the model uses."""
        self.loadable = self._of_model.keys()
        """The tensors of the model that the folder has: all but a fresh value head."""
        self._converted: Tensors = {}
        """Tensors of the last converted group that `load` has yet to return."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the folder, on the CPU, with the dtype and shape of its file."""
        with tensor_reader(self._all_headers) as read:
            return read(name)

    def load(self, name: str) -> torch.Tensor:
        """Return a full tensor of the model, on the CPU, converted from its tensors in the folder.

        Args:
            name: One of `loadable`.

        Raises:
            UserError: config.json ties tensors whose values differ.
        """
        if name not in self._converted:  # a group has one read for all its tensors
            self._converted = self._load_group(self._of_model[name])
        tensor = self._converted.pop(name)
        twin = self._twins.get(name)
        if twin is None:
            return tensor
        twin_tensor = self._load_group(twin)[name]
        if not torch.equal(tensor, twin_tensor):
            raise self._untied(name, twin.key)
        return tensor

    def to_folder(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Convert the model's tensors to the names and shapes of the folder.

        A fresh value head keeps its name. If `weights` has the model's order, at most one group is
        held in memory.

        Raises:
            InvariantError: A group is incomplete.
        """
        parts: PartialGroups = {}
        for name, tensor in weights:
            group = self._of_model.get(name)
            if group is None:
                yield name, tensor
                continue
            complete_group = add_to_group(
                parts,
                key=group.key,
                size=len(group.targets),
                name=name,
                tensor=tensor,
            )
            if complete_group:
                folder_tensors = self._revert(group, complete_group)
                yield from folder_tensors.items()
        if parts:
            key = next(iter(parts))
            raise InvariantError(f"{key} was streamed without the rest of its group")

    def _is_tied_copy(self, group: TensorGroup) -> bool:
        return self._first[group.key] != group.key

    def _plan(self, model: PreTrainedModel) -> list[TensorGroup]:
        """Group the tensors of the folder by the model's tensor that is made of them."""
        converters = list[WeightConverter]()
        renamings = list[Any]()
        for rule in get_model_conversion_mapping(model):
            if isinstance(rule, WeightConverter):
                converters.append(rule)
            else:
                renamings.append(rule)
        converter_of_pattern = dict[str, WeightConverter]()
        for converter in converters:
            converter_of_pattern |= dict.fromkeys(converter.source_patterns, converter)
        prefix = model.base_model_prefix
        groups = dict[tuple[str, str], TensorGroup]()
        for name in sorted(self.headers, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, self._meta)
            renamed = name
            for renaming in renamings:
                renamed, _ = renaming.rename_source_key(renamed)
            if key not in self._meta and name in self._meta:  # the name needs no renaming
                key = name
                pattern = None
            if key not in self._meta:
                continue
            pattern = pattern or ""
            converter = converter_of_pattern.get(pattern)
            # Tensors that are joined share a group. Any other tensor has its own.
            group_id = (key, "" if converter else name)
            group = groups.setdefault(group_id, TensorGroup(key=key, rule=converter))
            group.sources[name] = (renamed.removeprefix(self._prefix), pattern)
        return [*groups.values()]

    def _add(self, group: TensorGroup) -> None:
        """Add a group; check on the meta device that it can be converted to the model, and back."""
        label = self._label(group)
        self._check_dtypes(group, label)
        sources = Tensors()
        for name in group.sources:
            folder_shape = self.headers[name].shape
            sources[name] = torch.empty(folder_shape, device="meta")
        try:
            targets = self._convert(group, sources.__getitem__)
            group.targets = tuple(targets)
            reverted = self._revert(group, targets)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            reason = f"{one_line(error):.200}"
            raise UserError(f"{label} cannot be converted ({reason}). {DOWNLOAD_AGAIN}") from error
        for name, tensor in targets.items():
            model_shape = self._meta[name].shape
            if tensor.shape != model_shape:
                raise UserError(
                    f"{label} has shape {list(tensor.shape)}, "
                    f"the model of its config.json {list(model_shape)}. {DOWNLOAD_AGAIN}"
                )
            if self._of_model.setdefault(name, group) is not group:
                self._twins[name] = group
        for name, tensor in sources.items():
            if reverted[name].shape != tensor.shape:
                raise UserError(
                    f"{label} cannot be converted back to their shapes. {DOWNLOAD_AGAIN}"
                )

    def _label(self, group: TensorGroup) -> str:
        """Return the folder and some of the group's tensors, for an error."""
        names = [*group.sources]
        listed_names = ", ".join(names[:2])
        if len(names) > 2:
            listed_names += f", … ({len(names)} in all)"
        return f"'{self.folder}': {listed_names}"

    def _check_dtypes(self, group: TensorGroup, label: str) -> None:
        """Raise UserError if weights of a group are quantized."""
        if not self._meta[group.key].is_floating_point():
            return
        dtypes = {self.headers[name].dtype for name in group.sources}
        quantized_dtypes = dtypes - {*FLOATS}
        if quantized_dtypes:
            raise UserError(
                f"{label}: dtype {quantized_dtypes.pop()} is quantized, which cannot be trained. "
                "Use a folder with weights in bfloat16 or float32."
            )

    def _load_group(self, group: TensorGroup) -> Tensors:
        """Return the tensors of the model that are made of the group's tensors in the folder."""
        with tensor_reader(self.headers) as read:
            return self._convert(group, read)

    def _convert(self, group: TensorGroup, read: Read) -> Tensors:
        """Return the tensors of the model that are made of the group's tensors."""
        if group.rule is None:
            (name,) = group.sources
            return {self._first[group.key]: read(name)}
        rule = deepcopy(group.rule)
        for name, (_, pattern) in group.sources.items():
            rule.add_tensor(group.key, name, pattern, read(name))
        converted = self._apply(rule, group.key)
        model_tensors = Tensors()
        for name, tensor in converted.items():
            model_tensors[self._first[name]] = tensor
        return model_tensors

    def _revert(self, group: TensorGroup, tensors: Tensors) -> Tensors:
        """Return the tensors of the folder that the tensors of the model are made of."""
        if group.rule is None:
            return dict(zip(group.sources, tensors.values(), strict=True))
        rule = group.rule.reverse_transform()
        key = ""
        for name in group.targets:
            key, pattern = rule.rename_source_key(name)
            rule.add_tensor(key, name, pattern, tensors[name])
        renamed_tensors = Tensors()
        for name, tensor in self._apply(rule, key).items():
            renamed_tensors[name.removeprefix(self._prefix)] = tensor
        folder_tensors = Tensors()
        for name, (renamed, _) in group.sources.items():
            folder_tensors[name] = renamed_tensors[renamed]
        return folder_tensors

    def _apply(self, rule: Any, key: str) -> Tensors:
        """Return the tensors that a rule makes of the tensors that were added to it."""
        shapes = SimpleNamespace(get_parameter=self._meta.__getitem__)
        converted = rule.convert(key, model=shapes, config=self._config)
        tensors = Tensors()
        for name, tensor in converted.items():
            tensors[name] = tensor[0] if isinstance(tensor, list) else tensor
        return tensors

    def _check_ties(self, model: PreTrainedModel) -> None:
        """Raise UserError if tensors that config.json ties are different in the model."""
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        for name, other in ties.items():
            if self._first[name] != self._first[other]:
                raise self._untied(other, name)

    def _untied(self, name: str, other: str) -> UserError:
        return UserError(
            f"'{self.folder}': config.json ties {name} and {other}, "
            "whose values differ in the files. "
            "Set tie_word_embeddings to false in config.json, or remove one of them."
        )

    def _check_names(self, model: PreTrainedModel) -> None:
        """Raise UserError unless the folder holds exactly the tensors of the model."""
        missing = {*self._first.values()} - self._of_model.keys() - {SCORE}
        if missing:
            raise self._mismatch("lacks", missing)
        ignored = self._ignored_patterns(model)
        unexpected = set[str]()
        for name in self.headers.keys() - self._of_folder.keys():
            if not any(re.search(pattern, name) for pattern in ignored):
                unexpected.add(name)
        if unexpected:
            raise self._mismatch("has tensors that the model lacks:", unexpected)

    def _ignored_patterns(self, model: PreTrainedModel) -> list[str]:
        """Return expressions that match the tensors of a folder that the model ignores."""
        patterns = list[str](model._keys_to_ignore_on_load_unexpected or [])
        patterns.append(r"\.inv_freq$")
        if SCORE in self._meta:
            patterns.append(r"^lm_head\.")
        num_predictors = getattr(self._config, "num_nextn_predict_layers", None) or 0
        for number in range(num_predictors):
            layer = self._config.num_hidden_layers + number
            patterns.append(rf"\.layers\.{layer}\.")
        return patterns

    def _mismatch(self, relation: str, names: set[str]) -> UserError:
        """Return the error for names of tensors that only the folder or only the model has."""
        first_names = sorted(names)[:3]
        listed_names = ", ".join(first_names)
        advice = DOWNLOAD_AGAIN
        if names == {"lm_head.weight"}:
            advice = TIE
        elif re.search("vision|visual", " ".join(names)):
            advice = IMAGES
        return UserError(
            f"'{self.folder}' {relation} {listed_names} ({len(names)} in all). {advice}"
        )


@contextmanager
def tensor_reader(headers: Mapping[str, Header]) -> Generator[Read]:
    """Yield a function that reads a tensor of files by its name, onto the CPU.

    Each file is opened once. It does not stay open after the body: pages of an open file count as
    this process's memory.
    """
    with ExitStack() as stack:

        @cache
        def open_once(file: Path) -> Any:
            return stack.enter_context(safe_open(file, framework="pt"))

        def read(name: str) -> torch.Tensor:
            return open_once(headers[name].file).get_tensor(name)

        yield read


def add_to_group(
    parts: PartialGroups,
    *,
    key: str,
    size: int,
    name: str,
    tensor: torch.Tensor,
) -> Tensors | None:
    """Add a tensor to its group; remove and return the group if it has `size` tensors now."""
    group = parts.setdefault(key, {})
    group[name] = tensor
    if len(group) != size:
        return None
    return parts.pop(key)
