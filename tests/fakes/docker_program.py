"""Stands for the program `docker`: a container is a process that runs `arealite serve`.

The image `env/NAME` hosts environment NAME of tests.fakes.env_hosts; `mute` answers nothing;
`broken` exits at once; other images are missing. $FAKE_DOCKER is the folder of the containers: one
file for each, with its process id, its label and the arguments of `docker run`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ.get("FAKE_DOCKER", ""))


def value(words: list[str], option: str) -> str:
    """Return the value of `--option=value`; "" without it."""
    return next((w.partition("=")[2] for w in words if w.startswith(f"--{option}=")), "")


def run(words: list[str]) -> int:
    image = words[-1]
    port = value(words, "publish").split(":")[1]
    serve = [sys.executable, "-m", "arealite.cli.main", "serve", f"server.port={port}"]
    serve += ["imports=[tests.fakes.env_hosts]", f"env.type={image.partition('/')[2]}"]
    command = {"mute": ["sleep", "3600"], "broken": ["false"]}.get(image, serve)
    # A real container survives the program `docker`, and does not see its environment.
    own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
    process = subprocess.Popen(command, env=own, start_new_session=True, stdout=subprocess.DEVNULL)
    about = {"pid": process.pid, "label": value(words, "label"), "words": words}
    file = STATE / value(words, "name")
    file.write_text(json.dumps(about))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    file.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def main(words: list[str]) -> int:
    match words:
        case ["image", "inspect", image]:
            if image.startswith("env/") or image in ("mute", "broken"):
                return 0
            print(f"Error response from daemon: No such image: {image}", file=sys.stderr)
            return 1
        case ["run", *_]:
            return run(words)
        case ["ps", *_]:
            wanted = value(words, "filter").partition("=")[2]
            for file in STATE.iterdir():
                if json.loads(file.read_text())["label"] == wanted:
                    print(file.name)
        case ["rm", "--force", name]:
            file = STATE / name
            if file.exists():
                os.killpg(json.loads(file.read_text())["pid"], signal.SIGKILL)
                file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
