"""The node that spreads the sampling times by the size of the video."""

from typing import Any

from comfy_api.latest import io
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora2.times import shift


class ParallelOpenSora2Sampling(io.ComfyNode):  # type: ignore[misc]
    """ModelSamplingSD3 with Open-Sora 2.0's shift for a latent."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora2Sampling",
            display_name="Open-Sora 2.0 Sampling",
            category="Parallel DiT",
            description="Spreads the sampling times as Open-Sora 2.0's authors do for videos of this size. Use it with "
            "the scheduler simple.",
            inputs=[
                io.Model.Input("model", tooltip="Open-Sora 2.0."),
                io.Latent.Input("latent", tooltip="The latent to denoise. Its size decides."),
            ],
            outputs=[io.Model.Output(tooltip="For a sampler.")],
        )

    @classmethod
    @override
    def execute(cls, model: Any, latent: dict[str, Any]) -> io.NodeOutput:
        """Return the model with the shift."""
        size = latent["samples"].shape[2:]
        if len(size) != 3:
            raise InvalidRequest(
                f"a latent of shape {list(latent['samples'].shape)} is no video: use EmptyHunyuanLatentVideo"
            )
        return io.NodeOutput(*ModelSamplingSD3().patch(model, shift(size)))
