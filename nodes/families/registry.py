"""Bridges by the class name of the transformer."""

from ...parallel_backend.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from . import wan
from .bridge import Bridge

BRIDGES: dict[str, Bridge] = {"WanTransformer3DModel": wan.BRIDGE}


def bridge_for(checkpoint: Checkpoint) -> Bridge:
    """The bridge of a checkpoint's family, every component checked.

    Raises:
        InvalidRequest: a class that is not listed; the message has the list.
    """
    name = checkpoint.components["transformer"]
    bridge = BRIDGES.get(name)
    if bridge is None:
        raise InvalidRequest(f"{checkpoint.path.name}: transformer {name} is not supported; {', '.join(BRIDGES)} is")
    for component, known in (("vae", bridge.vaes), ("text_encoder", bridge.text_encoders)):
        found = checkpoint.components.get(component)
        if found is not None and found not in known:
            raise InvalidRequest(
                f"{checkpoint.path.name}: {component} {found} is not supported; for {name} it is {', '.join(known)}"
            )
    bridge.check(checkpoint)
    return bridge
