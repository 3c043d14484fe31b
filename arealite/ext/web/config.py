"""Options of environments in a real browser."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import Package, opt, sub
from arealite.base.extras import extra_requirement

PLAYWRIGHT = Package("playwright", extra_requirement("browser"))


@dataclass(frozen=True, kw_only=True)
class BrowserConfig:
    """The headless Chromium of a rollout worker, and the observations made from its pages."""

    executable: str = opt("chromium-headless-shell", "name or path of Chromium")
    sandbox: bool = opt(False, "enable Chromium's sandbox, for untrusted pages; not as root")
    contexts: int = opt(8, "concurrent episodes with a page in a worker; more wait", at_least=1)
    timeout_s: float = opt(10.0, "timeout of loading a page and of an action", above=0)
    settle_ms: int = opt(10, "delay between an action and reading the page", at_least=0)
    max_chars: int = opt(4000, "characters of a page in an observation", at_least=20)
    rules: Literal["full", "short", "none"] = opt(
        "full", "description of the actions in the first observation; later ones: short, or none"
    )


@dataclass(frozen=True, kw_only=True)
class BrowserEnvConfig:
    """MiniWoB++'s tasks in headless Chromium."""

    tasks: list[str] = sub(lambda: ["all"], "tasks, like click-test, flight.AA; all: 128 tasks")
    max_steps: int = opt(10, "actions after which the episode ends", at_least=1)
    browser: BrowserConfig = sub(BrowserConfig, "the browser")

    def packages(self) -> Iterator[Package]:
        """Yield the package of the browser."""
        yield PLAYWRIGHT


@dataclass(frozen=True, kw_only=True)
class WebArenaConfig:
    """WebArena's tasks on sites that the user serves."""

    tasks: str = opt("", "JSON file with WebArena's list of tasks")
    sites: dict[str, str] = sub(dict, "URL of each site, like shopping; default: $WA_SHOPPING, …")
    held_out: int = opt(5, "hold out every n-th task; 0: train and evaluate on all", at_least=0)
    judge: bool = opt(False, "the seat `judge` decides fuzzy matches; else answers must be equal")
    max_steps: int = opt(30, "actions after which the episode ends", at_least=1)
    browser: BrowserConfig = sub(BrowserConfig, "the browser")

    def packages(self) -> Iterator[Package]:
        """Yield the package of the browser."""
        yield PLAYWRIGHT
