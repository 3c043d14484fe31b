"""Base classes of options: the answers that the core needs besides the values of fields.

The config class of a part derives from the class of its kind here, if the answer of that class is
not its own. The core reads them without an import of the part.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from arealite.api.fields import Constraints

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig


class EnvOptions:
    """Options of an environment."""

    reads_columns: ClassVar[bool] = False
    """Whether the environment reads `Task.columns`."""


class RewardOptions:
    """Options of a reward function."""

    def unused_constraints(self, chosen: str) -> Constraints:
        """Yield the constraints of these options if `chosen`, another type, is the reward's.

        Each error begins with an option of the section `reward`.
        """
        yield from ()


class ServerOptions:
    """Options of an LLM server."""

    def supervise(self, config: "ServerConfig", command: Sequence[str], starter: Any) -> int | None:
        """Run a server in a child process; start it again when it dies or hangs.

        Args:
            config: The server's config.
            command: The command line of the child process.
            starter: Starts the child process (`RoleStarter`).

        Returns:
            The exit code; None: the server restarts its own processes, so it runs here.
        """
        return None


class PublisherOptions:
    """Options of a weight publisher."""

    needs_servers: ClassVar[bool] = True
    """Whether the run needs LLM servers."""

    def check_host(self, host: str) -> None:
        """Check that the publisher can use this host, at which trainer rank 0 will run.

        Raises:
            UserError: It cannot: a port is in use, say.
        """

    def run_constraints(self, config: "ExperimentConfig") -> Constraints:
        """Yield the constraints between this publisher and other options of a run.

        Each error begins with an option's whole name.
        """
        yield from ()
