"""The node that says how the ranks share the work."""

from typing import Any

from comfy_api.latest import io

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout.parallel_layout import STALE, ParallelLayout, read_balance

LayoutType = io.Custom("PARALLEL_LAYOUT")
Degree = int | None

TOOLTIPS = {
    "data": "Groups of ranks that each take a share of the batch. Helps only when the batch has more than one item.",
    "cfg": "2: half of the ranks compute the positive prompt, the others the negative one. Needs cfg other than 1.0.",
    "pipe": "Ranks that each hold a range of the layers. In ParallelSampler pieces of the picture stream through them "
    "(PipeFusion), which is approximate; in other samplers the whole picture does, exactly but one after the other: "
    "only prompts and batch items overlap.",
    "ring": "Ranks that share the tokens and pass keys and values around. Works with ulysses; needs less memory.",
    "ulysses": "Ranks that share the tokens of the picture and exchange attention heads. Nothing needs to divide.",
    "tensor": "Ranks that hold a part of every weight matrix each. At most the model's number of attention heads.",
}
SHARD = (
    "The ranks of ring and ulysses share one copy of the weights: a model larger than one GPU, at some loss of speed."
)
PATCHES = "Pieces of the picture that stream through pipe; 0 is twice as many as it has ranks, 1 is exact."
WARMUP = "Steps at the start that are exact all the same, where pipe or stale makes the others approximate."
KEPT = (
    "What the ranks of ring see of one another in ParallelSampler, which is approximate: previous is what they were in "
    "the step before, so that nobody waits (displaced patch); none is nothing at all, to compare with."
)
BALANCE = (
    "How fast the ranks of pipe, or of a stale ring, are, such as 2:1 where the first is twice as fast; the work is "
    "shared out like that. Empty: measured."
)
OFF = "off"


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
                io.Combo.Input("stale", options=[OFF, *STALE[1:]], default=OFF, tooltip=KEPT, optional=True),
                io.Int.Input("patches", default=0, min=0, max=4096, tooltip=PATCHES, optional=True),
                io.Int.Input("warmup", default=1, min=0, max=10000, tooltip=WARMUP, optional=True),
                io.String.Input("balance", default="", tooltip=BALANCE, optional=True),
            ],
            outputs=[LayoutType.Output(display_name="layout", tooltip="Goes to ParallelLoader's layout input.")],
        )

    @classmethod
    def validate_inputs(
        cls, data: Degree = 1, cfg: Degree = 1, pipe: Degree = 1, ring: Degree = 1, ulysses: Degree = 1,
        tensor: Degree = 1, shard_weights: bool | None = False, stale: str | None = OFF, patches: int | None = 0,
        warmup: int | None = 1, balance: str | None = "",
    ) -> bool | str:  # fmt: skip
        """Refuse when the prompt is queued; naming the inputs here lets our sentence come before ComfyUI's.

        An input that is a link is None here, and is checked when the node runs.
        """
        given = {"data": data, "cfg": cfg, "pipe": pipe, "ring": ring, "ulysses": ulysses, "tensor": tensor}
        degrees = {axis: degree for axis, degree in given.items() if degree is not None}
        try:
            if len(degrees) < len(given) or shard_weights is None or stale is None or patches is None:
                _layout(degrees)
            else:
                _layout(degrees, shard_weights, stale, patches, 1 if warmup is None else warmup, balance or "")
        except InvalidRequest as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, data: int, cfg: int, pipe: int, ring: int, ulysses: int, tensor: int, shard_weights: bool = False,
        stale: str = OFF, patches: int = 0, warmup: int = 1, balance: str = "",
    ) -> io.NodeOutput:  # fmt: skip
        """The layout, checked."""
        degrees = {"data": data, "cfg": cfg, "pipe": pipe, "ring": ring, "ulysses": ulysses, "tensor": tensor}
        return io.NodeOutput(_layout(degrees, shard_weights, stale, patches, warmup, balance))


def _layout(
    degrees: dict[str, Any], shard_weights: bool = False, stale: str = OFF, patches: int = 0, warmup: int = 1,
    balance: str = "",
) -> ParallelLayout:  # fmt: skip
    """The layout of the node's inputs.

    Raises:
        InvalidRequest: there can be no such layout.
    """
    return ParallelLayout(
        **degrees, shard_weights=shard_weights, stale="" if stale == OFF else stale, patches=patches, warmup=warmup,
        balance=read_balance(balance),
    )  # fmt: skip
