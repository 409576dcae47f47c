"""The node that says how the ranks share the work."""

from comfy_api.latest import io

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout import ParallelLayout

LayoutType = io.Custom("PARALLEL_LAYOUT")
Degree = int | None

TOOLTIPS = {
    "data": "Groups of ranks that each take a share of the batch. Helps only when the batch has more than one item.",
    "cfg": "2: half of the ranks compute the positive prompt, the others the negative one. Needs cfg other than 1.0.",
    "pipe": "Groups of ranks that each hold a range of the layers. Not built yet: leave at 1.",
    "ring": "Ranks that share the tokens and pass keys and values around. Works with ulysses; needs less memory.",
    "ulysses": "Ranks that share the tokens of the picture and exchange attention heads. Nothing needs to divide.",
    "tensor": "Ranks that hold a part of every weight matrix each. At most the model's number of attention heads.",
}
SHARD = (
    "The ranks of ring and ulysses share one copy of the weights: a model larger than one GPU, at some loss of speed."
)


class ParallelLayoutNode(io.ComfyNode):  # type: ignore[misc]
    """Degrees per axis; their product is the number of ranks used."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelLayout",
            display_name="Parallel Layout",
            category="Parallel DiT",
            description="How the ranks share the work. The product of the numbers is how many ranks are used.",
            inputs=[
                *(io.Int.Input(axis, default=1, min=1, max=64, tooltip=tooltip) for axis, tooltip in TOOLTIPS.items()),
                io.Boolean.Input("shard_weights", default=False, tooltip=SHARD, optional=True),
            ],
            outputs=[LayoutType.Output(display_name="layout", tooltip="Goes to ParallelLoader's layout input.")],
        )

    @classmethod
    def validate_inputs(
        cls, data: Degree = 1, cfg: Degree = 1, pipe: Degree = 1, ring: Degree = 1, ulysses: Degree = 1,
        tensor: Degree = 1, shard_weights: bool | None = False,
    ) -> bool | str:  # fmt: skip
        """Refuse when the prompt is queued; naming the inputs here lets our sentence come before ComfyUI's.

        An input that is a link is None here, and is checked when the node runs.
        """
        degrees = {"data": data, "cfg": cfg, "pipe": pipe, "ring": ring, "ulysses": ulysses, "tensor": tensor}
        given = {axis: degree for axis, degree in degrees.items() if degree is not None}
        try:
            ParallelLayout(**given, shard_weights=bool(shard_weights) and len(given) == len(degrees))
        except InvalidRequest as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, data: int, cfg: int, pipe: int, ring: int, ulysses: int, tensor: int, shard_weights: bool = False
    ) -> io.NodeOutput:
        """The layout, checked."""
        return io.NodeOutput(
            ParallelLayout(
                data=data, cfg=cfg, pipe=pipe, ring=ring, ulysses=ulysses, tensor=tensor, shard_weights=shard_weights
            )
        )
