"""Which requests may ask for compiled blocks."""

from ..checkpoint.checkpoint import Checkpoint
from ..distributed.collectives import refused_alike
from ..distributed.mesh import RankMesh
from ..errors import InvalidRequest
from ..loading.compiled_blocks import check_compiler
from ..loading.components import ComponentCache

_NOT_COMPILED = ("MochiTransformer3DModel",)
"""Classes whose layers read numbers from the GPU in the middle, so that they are no single graph."""


def check(components: ComponentCache, mesh: RankMesh) -> None:
    """Refuse blocks that cannot be compiled, on all ranks alike. Collective over the mesh.

    Raises:
        InvalidRequest: the model, the layout or a rank's machine does not allow it.
    """
    name = next((each for each in components.checkpoint.components.values() if each in _NOT_COMPILED), None)
    if name:
        raise InvalidRequest(f"compile=blocks: the layers of {name} cannot be compiled; choose off")
    if mesh.layout.tensor > 1:
        raise InvalidRequest(
            f"compile=blocks does not work with tensor={mesh.layout.tensor}, whose ranks exchange inside of layers: "
            "choose ulysses, ring, cfg or pipe instead of tensor, or compile=off"
        )
    if _compressed(components.checkpoint, components.transformers.names):
        raise InvalidRequest(
            f"compile=blocks does not work with compressed weights, and {components.name} has some: choose a file in "
            "bf16, fp16 or fp32, or compile=off"
        )
    with refused_alike(mesh.all_ranks):
        check_compiler(components.device)


def _compressed(checkpoint: Checkpoint, names: list[str]) -> bool:
    return any(stored.compression is not None for name in names for stored in checkpoint.weights(name).values())
