"""`arealite completion bash|zsh|fish`: prints a script with which the shell completes commands and
config keys.

The script holds all words itself: a shell that asked Python at each Tab would take a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.base import config as base_config
from arealite.base.registry import import_plugins
from arealite.cli import configs
from arealite.cli.main import COMMANDS

ROOTS = {ExperimentConfig: ("train", "check", "launch"), ServerConfig: ("serve-llm", "info")}
"""Which commands take overrides, and of which config."""
OPTIONS = ["--config", "--help"]
MORE = {
    "train": ["--resume", "--dry-run", "--then"],
    "check": ["--then"],
    "launch": ["slurm", "ray", "--print"],
}
BASH = """\
# bash: source <(arealite completion bash)
_arealite() {{
  local words=
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"
  else case ${{COMP_WORDS[1]}} in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  return 0
}}
complete -o default -F _arealite arealite
"""
ZSH = """\
#compdef arealite
# zsh: source <(arealite completion zsh)
_arealite() {{
  local -a found
  if (( CURRENT == 2 )); then found=({commands})
  else case $words[2] in
{cases}
  esac; fi
  compadd -- ${{found:#*=}} && return
  compadd -S '' -- ${{(M)found:#*=}} && return
  compset -P '*='
  _files
}}
compdef _arealite arealite
"""


def main(argv: Sequence[str]) -> int:
    """Print the script of one shell."""
    parser = argparse.ArgumentParser(
        prog="arealite completion",
        description="Print a script that completes commands and config keys. In bash and zsh: "
        "source <(arealite completion bash); in fish: arealite completion fish | source",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    shell = parser.parse_args(argv).shell
    import_plugins([])
    print(fish() if shell == "fish" else posix(shell), end="")
    return 0


def keys(schema: type) -> dict[str, str]:
    """Return each key of a root config, with its documentation."""
    grown = base_config.extend(schema, configs.parts())
    return {path: text for path, _, text in base_config.keys(grown)}


def posix(shell: str) -> str:
    """Return the script for bash or zsh."""
    found = dict[str, list[str]]()
    for schema, commands in ROOTS.items():
        words = [*OPTIONS, *(f"{key}=" for key in keys(schema))]
        found |= {command: [*MORE.get(command, []), *words] for command in commands}
    found["completion"] = ["bash", "zsh", "fish"]
    form = '    {}) words="{}";;' if shell == "bash" else "    {}) found=({});;"
    cases = "\n".join(form.format(name, " ".join(words)) for name, words in found.items())
    return (BASH if shell == "bash" else ZSH).format(commands=" ".join(COMMANDS), cases=cases)


def fish() -> str:
    """Return the script for fish, which shows what each word means."""

    def line(condition: str, word: str, text: str) -> str:
        text = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"complete -c arealite -n '{condition}' -a '{word}' -d '{text}'"

    lines = [line("__fish_use_subcommand", name, text) for name, (_, text) in COMMANDS.items()]
    for schema, commands in ROOTS.items():
        seen = f"__fish_seen_subcommand_from {' '.join(commands)}"
        lines += [line(seen, f"{key}=", text) for key, text in keys(schema).items()]
        lines += [line(seen, option, "") for option in OPTIONS]
    for command, words in (MORE | {"completion": ["bash", "zsh", "fish"]}).items():
        lines += [line(f"__fish_seen_subcommand_from {command}", word, "") for word in words]
    return "\n".join(lines) + "\n"
