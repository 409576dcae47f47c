"""The node that gives a model a class to draw."""

import torch
from comfy_api.latest import io

from .families.dit import LABEL, NO_CLASS


class ParallelClassLabel(io.ComfyNode):  # type: ignore[misc]
    """A class by number, and none of them as its negative."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelClassLabel",
            display_name="Parallel Class Label",
            category="Parallel DiT",
            description="What DiT draws: a class by its number, in the place of a prompt.",
            inputs=[
                io.Int.Input(
                    "label",
                    default=207,
                    min=0,
                    max=1_000_000,
                    tooltip="The class. Most models know ImageNet's: 0 to 999, such as 207 for a golden retriever.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="The class, for a sampler's positive."),
                io.Conditioning.Output(display_name="negative", tooltip="No class, for a sampler's negative."),
            ],
        )

    @classmethod
    def execute(cls, label: int) -> io.NodeOutput:
        """The conditioning of a class, and that of none."""
        # ComfyUI wants a tensor in every conditioning; this one is not used.
        positive, negative = ([[torch.zeros(1, 1, 1), {LABEL: number}]] for number in (label, NO_CLASS))
        return io.NodeOutput(positive, negative)
