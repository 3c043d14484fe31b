"""New weights are checked completely before any parameter changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from arealite.base.errors import UserError
from arealite.ext.embedded import staged_versions, weight_loading
from arealite.ext.embedded.protocol import RequestRefused
from arealite.ext.embedded.weight_loading import (
    ServedWeights,
    load_model,
    pick_device,
    stage_tensors,
    stage_weights,
)
from tests.hostile import BROKEN_INDEXES

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(folders: list[Path]) -> Any:
    return load_model(str(folders[0]), dtype="float32", device="cpu")[0]


@pytest.fixture
def weights(model: Any, folders: list[Path]) -> ServedWeights:
    return ServedWeights(model, folders[0])


def stage(weights: ServedWeights, folder: Path) -> Callable[[], None]:
    return stage_weights(weights, str(folder))


def snapshot(model: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_load_replaces_every_tensor(
    model: Any, weights: ServedWeights, folders: list[Path]
) -> None:
    stage(weights, folders[1])()
    other = load_model(str(folders[1]), dtype="float32", device="cpu")[0]
    assert same(model.state_dict(), other.state_dict())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: list[Path]) -> Path:
    """Return a folder that a publisher has staged in memory."""
    monkeypatch.setattr(staged_versions, "TMPFS", tmp_path)
    folder = tmp_path / "arealite-0-1-x/v1"
    shutil.copytree(folders[1], folder)
    return folder


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_version_staged_in_memory_is_shared_until_the_next_one(
    model: Any,
    weights: ServedWeights,
    folders: list[Path],
    staged: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[None]()
    monkeypatch.setattr(weight_loading, "return_free_memory", lambda: calls.append(None))
    stage(weights, staged)()
    stage(weights, staged)()
    assert len(calls) == 1  # only the first load frees memory of the model's own
    other = load_model(str(folders[1]), dtype="float32", device="cpu")[0]
    file = str(staged / "model.safetensors")
    assert file in mapped_files()
    shutil.rmtree(staged)
    assert same(model.state_dict(), other.state_dict())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    stage(weights, folders[2])()  # copied, because a user's folder may change
    assert str(folders[2]) not in mapped_files()
    assert file not in mapped_files()
    newest = load_model(str(folders[2]), dtype="float32", device="cpu")[0]
    assert same(model.state_dict(), newest.state_dict())


@pytest.mark.parametrize("is_quantized", [False, True])
def test_staged_version_that_is_converted_is_copied(
    is_quantized: bool, folders: list[Path], staged: Path
) -> None:
    dtype = "float32" if is_quantized else "bfloat16"
    model = load_model(str(folders[0]), dtype=dtype, device="cpu")[0]
    weights = ServedWeights(model, folders[0], quantizes=is_quantized)
    before = (staged / "model.safetensors").read_bytes()
    stage(weights, staged)()
    copied = ServedWeights(
        load_model(str(folders[0]), dtype=dtype, device="cpu")[0],
        folders[0],
        quantizes=is_quantized,
    )
    stage(copied, folders[1])()
    assert same(model.state_dict(), copied.model.state_dict())
    assert (staged / "model.safetensors").read_bytes() == before


def drop(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.surprise"] = torch.zeros(3)


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


def quantize(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(32).to(torch.float8_e4m3fn)


def retype(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (drop, "lacks model.norm.weight"),
        (add, "'model.surprise' \\[3\\] is not in the model"),
        (reshape, r"has shape \[31\], but \[32\] in the model"),
        (retype, "has dtype torch.int64"),
        (quantize, "has dtype torch.float8_e4m3fn"),
    ],
)
def test_mismatched_file_is_refused_and_leaves_the_model_unchanged(
    model: Any,
    weights: ServedWeights,
    folders: list[Path],
    tmp_path: Path,
    spoil: Callable[[Tensors], None],
    text: str,
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    before = snapshot(model)
    with pytest.raises(RequestRefused, match=text):
        stage(weights, tmp_path)
    assert same(before, model.state_dict())


def test_broken_files_are_refused(
    model: Any, weights: ServedWeights, folders: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestRefused, match="Failed to get weights iterator"):
        stage(weights, tmp_path / "nowhere")
    whole = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestRefused, match="Failed to get weights iterator"):
        stage(weights, tmp_path)


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "fifo")
    return str(folder / "fifo")


def fifo_inside(folder: Path) -> str:
    os.mkfifo(folder / "model.safetensors")
    return str(folder)


def device_inside(folder: Path) -> str:
    (folder / "model.safetensors").symlink_to("/dev/zero")
    return str(folder)


def folder_inside(folder: Path) -> str:
    (folder / "model.safetensors").mkdir()
    return str(folder)


def fifo_as_index(folder: Path) -> str:
    os.mkfifo(folder / "model.safetensors.index.json")
    return str(folder)


def dangling(folder: Path) -> str:
    (folder / "model.safetensors").symlink_to(folder / "nothing")
    return str(folder)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (fifo, "fifo': Not a directory"),
        (lambda _: "/dev/zero", "'/dev/zero': Not a directory"),
        (lambda _: __file__, "Not a directory"),
        (lambda _: "", "No such file"),
        (lambda _: "a" * 50_000, "aaa.*File name too long"),
        (lambda _: "a\0b", "embedded null"),
        (lambda _: "\ud800", "surrogates not allowed"),
        (lambda folder: str(folder), "no safetensors in"),
        (fifo_inside, "model.safetensors is missing or not a regular file"),
        (device_inside, "model.safetensors is missing or not a regular file"),
        (folder_inside, "model.safetensors is missing or not a regular file"),
        (dangling, "model.safetensors is missing or not a regular file"),
        (fifo_as_index, "no safetensors in"),
    ],
)
def test_path_that_is_not_a_folder_of_regular_files_is_refused_unopened(
    model: Any, weights: ServedWeights, tmp_path: Path, make: Callable[[Path], str], text: str
) -> None:
    before = snapshot(model)
    with pytest.raises(
        RequestRefused, match=f"^Failed to get weights iterator: .*{text}"
    ) as refused:
        stage_weights(weights, make(tmp_path))
    assert len(str(refused.value)) < 1_000
    assert same(before, model.state_dict())


@pytest.mark.parametrize("content", BROKEN_INDEXES)
def test_broken_index_is_refused(weights: ServedWeights, tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(RequestRefused) as refused:
        stage_weights(weights, str(tmp_path))
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("is_file", [True, False])
def test_non_finite_weights_are_refused_and_leave_the_model_unchanged(
    model: Any,
    weights: ServedWeights,
    folders: list[Path],
    tmp_path: Path,
    value: float,
    is_file: bool,
) -> None:
    """1e39 is finite in float64, and not in the model's float32."""
    tensors = load_file(folders[1] / "model.safetensors")
    norm = tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    norm[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    before = snapshot(model)
    with pytest.raises(
        RequestRefused, match=r"'model\.norm\.weight' is not finite in torch\.float32"
    ):
        stage(weights, tmp_path) if is_file else stage_tensors(weights, [*tensors.items()], {})
    assert same(before, model.state_dict())


def test_bfloat16_and_sharded_files_are_loaded(
    model: Any, weights: ServedWeights, folders: list[Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    names = sorted(halves)
    save_file({n: halves[n] for n in names[:5]}, tmp_path / "model-1.safetensors")
    save_file({n: halves[n] for n in names[5:]}, tmp_path / "model-2.safetensors")
    stage(weights, tmp_path)()
    assert same({n: t.float() for n, t in halves.items()}, model.state_dict())


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    drop(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_half_precision_tensors_are_cast_to_the_models_dtype(
    model: Any, weights: ServedWeights, folders: list[Path]
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    stage_tensors(weights, [*halves.items()], {})()
    assert same({n: t.float() for n, t in halves.items()}, model.state_dict())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.nonsense"])
def test_one_mismatched_tensor_leaves_the_model_unchanged(
    model: Any, weights: ServedWeights, folders: list[Path], name: str
) -> None:
    tensors = load_file(folders[1] / "model.safetensors") | {name: torch.zeros(3)}
    before = snapshot(model)
    with pytest.raises(RequestRefused, match=f"Failed to update weights: tensor '{name}'"):
        stage_tensors(weights, [*tensors.items()], {})
    assert same(before, model.state_dict())


def test_partial_update_leaves_other_tensors_unchanged(model: Any, weights: ServedWeights) -> None:
    before = snapshot(model)
    stage_tensors(weights, [("model.norm.weight", torch.zeros(32))], {})()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.norm.weight"}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: shutil.rmtree(folder), "no config.json in it"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors in it"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 9), "is no safetensors"),
        (lose_a_tensor, "lacks model\\.norm\\.weight"),
    ],
)
def test_error_of_load_model_names_the_problem(
    folders: list[Path], tmp_path: Path, spoil: Callable[[Path], Any], text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders[0], folder)
    spoil(folder)
    with pytest.raises(UserError, match=text):
        load_model(str(folder), dtype="float32", device="cpu")


def test_load_model_refuses_empty_paths_dtypes_and_devices(folders: list[Path]) -> None:
    with pytest.raises(UserError, match="is no Hugging Face model folder"):
        load_model("", dtype="float32", device="cpu")
    with pytest.raises(UserError, match="must be one of"):
        load_model(str(folders[0]), dtype="int8", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU"):
            pick_device("cuda")
