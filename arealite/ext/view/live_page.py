"""The live page of a run with the option `view.web` (hook `run_started`)."""

from collections.abc import Callable, Coroutine

from arealite.api.experiment_config import ExperimentConfig, run_paths


def live_page(
    config: ExperimentConfig, say: Callable[[str], object]
) -> Coroutine[object, object, None] | None:
    """Return what serves the page, or None without `view.web`.

    Args:
        config: The experiment.
        say: Prints the page's address.
    """
    if not config.view.web:
        return None
    from arealite.ext.view.live import serve  # imports aiohttp

    return serve(run_paths(config), config.view.port, say)
