"""`arealite completion bash|zsh|fish`: prints a script with which the shell completes commands and
config keys.

The script holds all words itself: a shell that asked Python at each Tab would take a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.api.env_server import EnvServerConfig
from arealite.api.sampling import CollectConfig, EvaluateConfig
from arealite.base import config as base_config
from arealite.base.registry import import_plugins
from arealite.cli import configs
from arealite.cli.main import COMMANDS

ROOTS = {
    ExperimentConfig: ("train", "check", "launch"),
    ServerConfig: ("serve-llm", "info"),
    EnvServerConfig: ("serve",),
    EvaluateConfig: ("eval",),
    CollectConfig: ("collect",),
}
"""Which commands take overrides, and of which config."""
WORDS = {
    "train": ["--resume", "--dry-run", "--then"],
    "check": ["--then"],
    "launch": ["slurm", "ray", "--print"],
    "export": ["--step", "--out"],
    "completion": ["bash", "zsh", "fish"],
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
FISH = """\
# fish: arealite completion fish | source
complete -c arealite -n __fish_use_subcommand -a "{commands}"
{cases}
"""

SCRIPTS = {
    "bash": (BASH, '    {}) words="{}";;'),
    "zsh": (ZSH, "    {}) found=({});;"),
    "fish": (FISH, "complete -c arealite -n '__fish_seen_subcommand_from {}' -a '{}'"),
}
"""Of each shell: the script, and the line of one command in it."""


def main(argv: Sequence[str]) -> int:
    """Print the script of one shell."""
    parser = argparse.ArgumentParser(
        prog="arealite completion",
        description="Print a script that completes commands and config keys. In bash and zsh: "
        "source <(arealite completion bash); in fish: arealite completion fish | source",
    )
    parser.add_argument("shell", choices=list(SCRIPTS))
    script, line = SCRIPTS[parser.parse_args(argv).shell]
    cases = "\n".join(line.format(name, " ".join(found)) for name, found in words().items())
    print(script.format(commands=" ".join(COMMANDS), cases=cases), end="")
    return 0


def words() -> dict[str, list[str]]:
    """Return what may follow each command, with the keys of parts that installed packages add."""
    import_plugins([])
    found = dict(WORDS)
    for schema, commands in ROOTS.items():
        grown = base_config.extend(schema, configs.parts())
        keys = [f"{path}=" for path, _, _ in base_config.keys(grown)]
        for command in commands:
            found[command] = [*found.get(command, []), "--config", "--help", *keys]
    return found
