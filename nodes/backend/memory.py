"""Room for what the ranks are about to load on GPUs that they share with ComfyUI."""

from collections.abc import Collection

from .comfyui_models import shared_gpus, unload
from .connection import Handle


def make_room(handle: Handle, components: Collection[str], *, ranks: int) -> None:
    """Unload ComfyUI's own models from the GPUs where the first ``ranks`` ranks are about to load ``components``.

    Nothing is unloaded if these ranks already hold the components, or if ComfyUI uses none of their GPUs.
    """
    shared = shared_gpus(handle.spec.devices, ranks)
    if shared and not handle.holds(components, ranks=ranks):
        unload(shared)
