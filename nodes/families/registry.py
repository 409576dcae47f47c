"""Bridges by the class name of the transformer."""

from ...parallel_backend.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from .bridge import Bridge
from .flux import Flux
from .wan import Wan

BRIDGES: dict[str, type[Bridge]] = {
    "FluxTransformer2DModel": Flux,
    "WanTransformer3DModel": Wan,
}


def bridge_for(checkpoint: Checkpoint) -> Bridge:
    """The bridge of a checkpoint's family, every component checked.

    Raises:
        InvalidRequest: a class that is not listed; the message has the list.
    """
    name = checkpoint.components["transformer"]
    if name not in BRIDGES:
        raise InvalidRequest(f"{checkpoint.path.name}: transformer {name} is not supported; {', '.join(BRIDGES)} is")
    bridge = BRIDGES[name](checkpoint)
    bridge.check()
    return bridge
