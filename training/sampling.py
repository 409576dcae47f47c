"""Sampling from the trained pipeline with diffusers in one process, for tests and pictures."""

from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from numpy.typing import NDArray

GUIDANCE = 3.0
STEPS = 24
SHIFT = 8.0


def load(folder: Path, *, shift: float = SHIFT) -> WanPipeline:
    """Load a pipeline with a flow-matching Euler scheduler of the given shift, without progress bars."""
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(
    pipeline: WanPipeline,
    prompts: list[str],
    *,
    height: int,
    width: int,
    frames: int = 1,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> NDArray[np.float32]:
    """Sample one clip per prompt, ``[N, T, H, W, 3]`` in 0..1."""
    output = pipeline(
        prompts,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=512,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    clips: NDArray[np.float32] = output.frames.astype(np.float32)
    return clips
