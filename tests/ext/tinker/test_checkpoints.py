"""Checkpoints as folders: complete or absent, and inside the tenant's folder."""

from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.ext.tinker.checkpoints import Checkpoint, Checkpoints, ModelSpec

SPEC = ModelSpec(base_model="org/name", rank=8, train_mlp=True, train_attn=True)
PATH = "tinker://s:train:0/weights/one"


def write(checkpoints: Checkpoints, path: str = PATH, *, text: str = "x") -> None:
    folder = checkpoints.begin(path, overwrite=True)
    (folder / "file").write_text(text)
    checkpoints.commit(Checkpoint(path=path, spec=SPEC, created=0.0))


def test_checkpoint_exists_when_it_is_complete(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(PATH, overwrite=False)
    (folder / "file").write_text("x")
    with pytest.raises(UserError, match="there is no checkpoint"):
        checkpoints.read(PATH)

    checkpoints.commit(Checkpoint(path=PATH, spec=SPEC, created=0.0))

    assert checkpoints.read(PATH).spec == SPEC
    assert checkpoints.read(PATH).size_bytes == 1
    assert (checkpoints.folder(PATH) / "file").read_text() == "x"


def test_unfinished_one_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, text="old")

    unfinished = checkpoints.begin(PATH, overwrite=True)
    (unfinished / "file").write_text("new")

    assert (checkpoints.folder(PATH) / "file").read_text() == "old"
    with pytest.raises(UserError, match="exists already"):
        checkpoints.begin(PATH, overwrite=False)


def test_lists_have_named_checkpoints_of_one_model_or_all(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    other = "tinker://s:train:1/sampler_weights/two"
    for path in (PATH, other, "tinker://s:train:0/snapshots/000001"):
        write(checkpoints, path)
    checkpoints.begin("tinker://s:train:0/weights/unfinished", overwrite=False)

    assert [item.path for item in checkpoints.list()] == [PATH, other]
    assert [item.path for item in checkpoints.list("s:train:1")] == [other]
    checkpoints.remove(PATH)
    assert [item.path for item in checkpoints.list()] == [other]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "weights/one",
        "tinker://s:train:0/one",
        "tinker://s:train:0/other/one",
        "tinker://../weights/one",
        "tinker://s/weights/..",
        "tinker://s/weights/.one",
        "tinker://s/weights/a/b",
        "tinker://s/weights/",
        "tinker:///weights/one",
        "tinker://s/weights/one\0",
        f"tinker://s/weights/{'a' * 300}",
    ],
)
def test_path_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    for call in (checkpoints.folder, checkpoints.read):
        with pytest.raises(UserError):
            call(path)


@pytest.mark.parametrize("model_id", ["../x", "a*", "", "a/b"])
def test_model_of_a_list_is_a_name(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        Checkpoints(tmp_path).list(model_id)
