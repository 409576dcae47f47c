"""The node for Open-Sora 2.0's guidance by prompt and given frames."""

from typing import Any

import comfy.samplers
from comfy_api.latest import io
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.families.open_sora2.given_frames import GivenFrames, are_images, check_size, put_back
from ...parallel_backend.families.open_sora2.guidance import Guidance, Scales
from ..bridges.given_numbers import as_float

LATENT, UNKNOWN = "concat_latent_image", "concat_mask"
"""Keys of given frames in CONDITIONING: the latent, and where it is not given."""


class Guider(comfy.samplers.CFGGuider):  # type: ignore[misc]
    """Guides with two branches, or three where frames are given: prompt, negative prompt, and that without frames.

    Attributes:
        guidance: the scales.
        frames: given images, which are put over the result. None if there are none, or if clips are given.
    """

    guidance: Guidance
    frames: GivenFrames | None

    def set_prompts(
        self, positive: list[Any], negative: list[Any], *, text: float, frames: float, oscillates: bool
    ) -> None:
        """Set the branches and how strongly they count."""
        latent, unknown = (_first(positive, key) for key in (LATENT, UNKNOWN))
        conds = {"positive": positive, "negative": negative}
        self.frames = None
        if latent is not None and unknown is not None and latent.ndim == unknown.ndim == 5 and unknown.shape[2] > 1:
            conds["without_frames"] = [[tensor, _without_frames(options)] for tensor, options in negative]
            if are_images(1 - unknown):
                self.frames = GivenFrames(given=1 - unknown, latent=latent)
        self.guidance = Guidance(text=text, frames=frames, oscillates=oscillates, ramp=self.frames is not None)
        self.inner_set_conds(conds)

    @override
    def predict_noise(
        self, x: Tensor, timestep: Tensor, model_options: dict[str, Any] | None = None, seed: int | None = None
    ) -> Tensor:
        """Return the denoised latent of a step. Branches that do not count are not computed."""
        options = {} if model_options is None else model_options
        scales = self._scales(x, timestep, options["transformer_options"]["sample_sigmas"])
        positive, negative, without = (self.conds.get(name) for name in ("positive", "negative", "without_frames"))
        if without is None or not scales.needs_without_frames:
            guided: Tensor = comfy.samplers.sampling_function(
                self.inner_model, x, timestep, negative, positive, scales.text, options, seed
            )
            return guided
        branches = [positive, negative, without]
        by_prompt, plain, empty = comfy.samplers.calc_cond_batch(self.inner_model, branches, x, timestep, options)
        by_frames: Tensor = comfy.samplers.cfg_function(
            self.inner_model, plain, empty, scales.frames, x, timestep, model_options=options, cond=negative,
            uncond=without,
        )  # fmt: skip
        by_both: Tensor = by_frames + scales.text * (by_prompt - plain)
        return by_both

    def _scales(self, x: Tensor, timestep: Tensor, sigmas: Tensor) -> Scales:
        """Return the scales of the step that a time lies in."""
        step = int((sigmas.to(timestep) >= timestep.max() * (1 - 1e-6)).sum()) - 1
        scales = self.guidance.at(min(max(step, 0), len(sigmas) - 2), len(sigmas) - 1, x.shape[2])
        if isinstance(scales.frames, Tensor):
            return Scales(text=scales.text, frames=scales.frames.to(x))
        return scales

    @override
    def sample(self, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Sample, and put given images over the result.

        Raises:
            InvalidRequest: the given images are for a latent of another size.
        """
        if self.frames is not None:
            check_size(self.frames, noise.shape[2:])
        samples: Tensor = super().sample(noise, *args, **kwargs)
        return samples if self.frames is None else put_back(samples, self.frames)


def _first(prompt: list[Any], key: str) -> Any:
    return next((options[key] for _, options in prompt if key in options), None)


def _without_frames(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in (LATENT, UNKNOWN)}


class ParallelOpenSora2Guider(io.ComfyNode):  # type: ignore[misc]
    """The guider for SamplerCustomAdvanced."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora2Guider",
            display_name="Open-Sora 2.0 Guider",
            category="Parallel DiT",
            description="Guides Open-Sora 2.0 by prompt and given frames, as its authors do. For "
            "SamplerCustomAdvanced.",
            inputs=[
                io.Model.Input("model", tooltip="Open-Sora 2.0."),
                io.Conditioning.Input("positive", tooltip="The prompt, with or without given frames."),
                io.Conditioning.Input("negative", tooltip="The negative prompt, with the same given frames."),
                io.Float.Input(
                    "cfg_text", default=7.5, min=0.0, max=100.0, step=0.1, round=0.01,
                    tooltip="How strongly the prompt guides.",
                ),
                io.Float.Input(
                    "cfg_frames", default=3.0, min=0.0, max=100.0, step=0.1, round=0.01,
                    tooltip="How strongly given frames guide. Given images do so less towards the end of the sampling "
                    "and the start of the video. Without given frames it does not count.",
                ),
                io.Boolean.Input(
                    "oscillation", default=True,
                    tooltip="From step 11 on, every second step is not guided and computes the prompt's branch alone.",
                ),
            ],
            outputs=[io.Guider.Output(tooltip="For SamplerCustomAdvanced.")],
        )  # fmt: skip

    @classmethod
    @override
    def execute(
        cls, model: Any, positive: list[Any], negative: list[Any], cfg_text: float, cfg_frames: float, oscillation: bool
    ) -> io.NodeOutput:
        """Return the guider."""
        guider = Guider(model)
        guider.set_prompts(
            positive, negative, text=as_float(cfg_text, "cfg_text"), frames=as_float(cfg_frames, "cfg_frames"),
            oscillates=oscillation,
        )  # fmt: skip
        return io.NodeOutput(guider)
