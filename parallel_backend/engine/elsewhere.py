"""The engine's interface to ``machines``, for a client or ranks on other machines."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from ..layout.parallel_layout import ParallelLayout
from ..protocol.deadlines import Deadline
from ..protocol.messages import RankRequest
from ..protocol.model_spec import ModelSpec

M = TypeVar("M", bound=RankRequest)


class Elsewhere(Protocol):
    """The other machines, as one rank sees them. All ranks take the same steps, since they get the same requests."""

    def localised(self, message: M) -> M:
        """Return a request with this machine's paths. Collective over the world if it names new files.

        Raises:
            InvalidRequest: on all ranks alike; a rank's machine lacks a file, or has another one with its name.
        """

    def missing(self, message: RankRequest) -> tuple[str, ...]:
        """Return the ids of the files that the client of a request has to send to rank 0."""

    def receive(
        self, connection: socket.socket, wanted: tuple[str, ...], *, deadline: Deadline, poll: Callable[[], None]
    ) -> None:
        """Receive them, see ``machines.ranks.received_files``."""

    def original(self, path: str) -> str:
        """Return the path that requests use for a file of this machine."""

    def forget(self, model: ModelSpec) -> None:
        """Forget a model that is unloaded, by its path on this machine."""

    def loop(self, layout: ParallelLayout, *, chosen: bool) -> AbstractContextManager[Callable[[], str]]:
        """Return a function to call after each step of a loop, on rank 0. It returns a note for the user.

        ``chosen`` says whether the layout was chosen for the user.
        """

    def forward(self, model: str, layout: ParallelLayout, *, chosen: bool) -> AbstractContextManager[None]:
        """Surround one forward of a model, by the model's path, on rank 0."""
