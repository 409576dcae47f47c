"""The node that makes of a prompt what Open-Sora 1.2 was trained on."""

from comfy_api.latest import io
from typing_extensions import override

from ...parallel_backend.families.open_sora1.prompt import cleaned, with_scores
from ..bridges.given_numbers import as_float


class ParallelOpenSora1Prompt(io.ComfyNode):  # type: ignore[misc]
    """Adds scores and the camera's motion to a prompt, and cleans it."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora1Prompt",
            display_name="Open-Sora 1.2 Prompt",
            category="Parallel DiT",
            description="Adds scores and the camera's motion to a prompt, and cleans it, as Open-Sora 1.2 learnt "
            "prompts.",
            inputs=[
                io.String.Input("prompt", multiline=True, tooltip="What the video should show."),
                io.Float.Input(
                    "aesthetic_score", default=6.5, min=0.0, max=10.0, step=0.1, round=0.1,
                    tooltip="How beautiful the video should be. The best are above 6. 0 adds none.",
                ),
                io.Float.Input(
                    "motion_score", default=0.0, min=0.0, max=100.0, step=0.1, round=0.1,
                    tooltip="How much should move, such as 4. 0 adds none.",
                ),
                io.String.Input(
                    "camera_motion", default="",
                    tooltip="Such as pan left, pan right, tilt up, tilt down, zoom in, zoom out or static. Empty adds "
                    "none.",
                ),
            ],
            outputs=[io.String.Output(display_name="prompt", tooltip="For the text of CLIPTextEncode.")],
        )  # fmt: skip

    @classmethod
    @override
    def execute(cls, prompt: str, aesthetic_score: float, motion_score: float, camera_motion: str) -> io.NodeOutput:
        """Return the prompt. What it says of a score itself stays."""
        aesthetic, motion = as_float(aesthetic_score, "aesthetic_score"), as_float(motion_score, "motion_score")
        return io.NodeOutput(
            cleaned(
                with_scores(prompt, aesthetic=aesthetic or None, motion=motion or None, camera=camera_motion.strip())
            )
        )
