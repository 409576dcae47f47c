"""The node that ends a prompt as Open-Sora 2.0 expects it."""

from comfy_api.latest import io
from typing_extensions import override

from ...parallel_backend.families.open_sora2.prompt import with_frame_rate, with_motion_score
from ..bridges.given_numbers import as_int


class ParallelOpenSora2Prompt(io.ComfyNode):  # type: ignore[misc]
    """Adds the frame rate and the motion score to a prompt."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora2Prompt",
            display_name="Open-Sora 2.0 Prompt",
            category="Parallel DiT",
            description="Adds frame rate and motion score to a prompt, as the model learnt them. Only for the "
            "positive prompt.",
            inputs=[
                io.String.Input("prompt", multiline=True, tooltip="What the video should show."),
                io.Int.Input(
                    "frame_rate", default=24, min=1, max=120,
                    tooltip="Frames a second. Not added to a prompt that ends with them, such as 16 FPS.",
                ),
                io.Int.Input("motion_score", default=4, min=1, max=10, tooltip="1 is little motion, 7 is much."),
            ],
            outputs=[io.String.Output(display_name="prompt", tooltip="For the text of CLIPTextEncode.")],
        )  # fmt: skip

    @classmethod
    @override
    def execute(cls, prompt: str, frame_rate: int, motion_score: int) -> io.NodeOutput:
        """Return the prompt with both at its end."""
        rated = with_frame_rate(prompt, as_int(frame_rate, "frame_rate"))
        return io.NodeOutput(with_motion_score(rated, str(as_int(motion_score, "motion_score"))))
