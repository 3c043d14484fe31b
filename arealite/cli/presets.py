"""Configs by name: `--config demo` reads the package's config/demo.yaml."""

from pathlib import Path

from arealite.base.errors import UserError
from arealite.base.registry import unknown

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
"""Folder of the YAML files; a link in a checkout, a folder in an installed wheel."""


def names() -> list[str]:
    """Return the names of all presets: first those that are complete, then parts of a config."""
    files = [file.relative_to(CONFIG_DIR) for file in CONFIG_DIR.rglob("*.yaml")]
    files.sort(key=lambda file: (len(file.parts), file))
    return [str(file.with_suffix("")) for file in files]


def find(name: str) -> Path:
    """Return the file of a config: `name` if it is a file, else the preset of this name.

    A preset's last part is enough, and the path in a checkout works, too: gspo and
    config/algo/gspo.yaml are algo/gspo.

    Raises:
        UserError: There is no such file and no such preset.
    """
    file = Path(name).expanduser()
    short = name.removeprefix("config/").removesuffix(".yaml")
    matches = [preset for preset in names() if f"/{preset}".endswith(f"/{short}")]
    if matches and not file.is_file():
        return CONFIG_DIR / f"{matches[0]}.yaml"
    if file.exists() or file.suffix in (".yaml", ".yml"):  # reading it reports a missing file
        return file
    raise UserError(
        f"{unknown('preset', name, names())} `arealite presets` describes them. "
        "A file of your own ends with .yaml."
    )
