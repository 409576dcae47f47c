"""The node that selects the class for a class-conditional model such as DiT to generate."""

import torch
from comfy_api.latest import io
from typing_extensions import override

from .bridges.given_numbers import as_int
from .families.dit import LABEL, NO_CLASS


class ParallelClassLabel(io.ComfyNode):  # type: ignore[misc]
    """The conditioning of a class, and of no class as its negative."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelClassLabel",
            display_name="Parallel Class Label",
            category="Parallel DiT",
            description="Selects the class for a class-conditional model such as DiT to generate. "
            "It replaces the prompt.",
            inputs=[
                io.Int.Input(
                    "label",
                    default=207,
                    min=0,
                    max=1_000_000,
                    tooltip="The class. Most models have ImageNet's: 0 to 999, such as 207 for a golden retriever.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="The class, for a sampler's positive."),
                io.Conditioning.Output(display_name="negative", tooltip="No class, for a sampler's negative."),
            ],
        )

    @classmethod
    @override
    def execute(cls, label: int) -> io.NodeOutput:
        """Return the conditioning of a class and of no class."""
        # ComfyUI needs a tensor in every conditioning. This one is unused.
        positive, negative = ([[torch.zeros(1, 1, 1), {LABEL: number}]] for number in (as_int(label, LABEL), NO_CLASS))
        return io.NodeOutput(positive, negative)
