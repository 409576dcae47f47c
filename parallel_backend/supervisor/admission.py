"""Which requests a supervisor refuses because of where their client is, or because of its code."""

from ..errors import BackendUnavailable
from ..protocol.messages import RankRequest

_NOT_FORWARDED = (
    "this ComfyUI is on another machine than the backend, which was started for its own machine alone: start it there "
    "with python -m parallel_backend serve --forwarded"
)
_OTHER_CODE = (
    "the backend runs different code from this ComfyUI: install the same version on all machines, and start the "
    "backend again"
)
_BUSY = "the backend is busy and runs different code from this ComfyUI: try again later"


def refusal(
    message: RankRequest, *, for_several_machines: bool, same_program: bool, busy: bool
) -> BackendUnavailable | None:
    """Return why a request is refused, or None.

    Without a refusal, a backend that runs other code than the client ends, and the client starts one from its own
    files. A client cannot start a backend for several machines.
    """
    if not for_several_machines and _is_foreign(message):
        return BackendUnavailable(_NOT_FORWARDED)
    if same_program:
        return None
    if for_several_machines:
        return BackendUnavailable(_OTHER_CODE)
    return BackendUnavailable(_BUSY) if busy else None


def _is_foreign(message: RankRequest) -> bool:
    """Whether a request comes from another machine: it names its model's content, but no other hosts."""
    model = getattr(message, "model", None)
    return bool(model and model.content and not model.devices.hosts)
