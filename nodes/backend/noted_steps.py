"""Notes the steps of ComfyUI's running node in the session's ``Activity``."""

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from torch import Tensor

from ...parallel_backend.errors import BackendError
from ...parallel_backend.protocol.messages import Forward, Progress, RankRequest, Sample
from ...parallel_backend.protocol.origin import Origin
from .activity import Activity, named
from .page import notice, tell_steps
from .progress_text import PLANNING, OnProgress, duration
from .session import current

SAMPLING = "sampling"
"""The phase whose steps are noted."""


def executing_origin() -> Origin | None:
    """Return the running prompt, and the node that the user sees running; None in a script."""
    context = get_executing_context()
    if context is None:
        return None
    return named(context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id))


def note_failure(origin: Origin | None, error: BackendError) -> None:
    """Note a failure, and show it in the page with what to do."""
    current().part(Activity).failed(origin, error)
    _notice("failed", str(error), origin, error.code)


def note_recovery(origin: Origin | None, sentence: str) -> None:
    """Note what was done about a failure, and show it in the page."""
    current().part(Activity).recovered(origin, sentence)
    _notice("recovered", sentence, origin)


def note_approximation(method: str) -> None:
    """Show in the page that the running node's result is approximate."""
    _notice("approximate", method, executing_origin())


def _notice(kind: str, text: str, origin: Origin | None, code: str = "") -> None:
    if origin is not None:
        notice(kind, text, code=code, prompt=origin.prompt, node=origin.node)


def _note(origin: Origin | None, done: float, total: float) -> None:
    activity = current().part(Activity)
    activity.progressed(origin, done, total)
    steps = activity.steps
    if origin is not None and steps.seconds:
        tell_steps(origin.node, done=done, total=total, seconds=steps.usual, left=steps.left)


def note_steps(origin: Origin | None) -> None:
    """Note how far ComfyUI's own step loop is."""
    if loop := _comfyui_loop():
        _note(origin, *loop)


def sampling_text(origin: Origin | None) -> str:
    """Return the state of a node that samples in ComfyUI's own loop, such as ``sampling 3/20, about 12 s left``."""
    loop = _comfyui_loop()
    return f"{SAMPLING} {loop[0]:g}/{loop[1]:g}{time_left(origin, *loop)}" if loop else SAMPLING


def time_left(origin: Origin | None, done: float, total: float) -> str:
    """Return how long the other steps of a node will take, such as ``, about 12 s left``; "" if that is not known."""
    steps = current().part(Activity).steps
    known = steps.origin == origin and steps.total == total and steps.seconds and done < total
    return f", about {duration((total - done) * steps.usual)} left" if known else ""


def _comfyui_loop() -> tuple[float, float] | None:
    """Return how many steps of the running node are done, and how many there are; None if it has no loop."""
    context = get_executing_context()
    state = get_progress_state().nodes.get(context.node_id) if context else None
    return None if state is None or state["max"] <= 1 else (state["value"], state["max"])


def noted_progress(origin: Origin | None, phase: str, on_progress: OnProgress | None) -> OnProgress:
    """Return a callback that also notes the steps of a loop in the backend.

    Args:
        origin: the node that samples.
        phase: of the request.
        on_progress: takes the progress of the phase.
    """

    def progressed(progress: Progress, tensors: dict[str, Tensor]) -> None:
        if phase == SAMPLING and progress.total > 1:
            _note(origin, progress.value, progress.total)
        if on_progress is not None:
            on_progress(progress, tensors)

    return progressed


def noted_plan(message: RankRequest, on_progress: OnProgress) -> OnProgress:
    """Return a callback that also notes why a sampling gets its layout."""
    activity = current().part(Activity)
    if isinstance(message, Forward | Sample):
        activity.planning(message.model)

    def progressed(progress: Progress, tensors: dict[str, Tensor]) -> None:
        if progress.phase == PLANNING and progress.value:
            activity.planned(progress.note)
        on_progress(progress, tensors)

    return progressed
