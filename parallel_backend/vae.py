"""The VAE on rank 0, untiled, frame by frame with progress.

Latents are ComfyUI's raw ones (after ``latent_format.process_out``), which is what diffusers'
``AutoencoderKLWan`` takes and gives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidRequest
from .wire import TensorMeta

CHANNELS, DOWNSAMPLE = 16, (False, True, True)

Tick = Callable[[int, int], None]
"""Called with the number of parts done and the total; may raise to end the work."""


def check(metas: tuple[TensorMeta, ...], config: dict[str, Any], *, name: str) -> None:
    """Check a ``Decode`` (``name="latent"``) or an ``Encode`` (``name="pixels"``) by its header.

    Raises:
        InvalidRequest: names the shape and what would work.
    """
    if config.get("patch_size") is not None:
        raise InvalidRequest("this VAE works on patches (Wan 2.2's 48-channel one), which is not supported yet")
    if [meta.name for meta in metas] != [name] or len(metas[0].shape) != 5 or 0 in metas[0].shape:
        raise InvalidRequest(f"the VAE takes one tensor {name} of 5 dims, none of them empty")
    # What a config leaves out is AutoencoderKLWan's default.
    shape, ratio = metas[0].shape, 2 ** len(config.get("temperal_downsample", DOWNSAMPLE))
    channels = config.get("z_dim", CHANNELS)
    if name == "latent" and shape[1] != channels:
        raise InvalidRequest(f"the latent has {shape[1]} channels and this VAE takes {channels}")
    if name == "pixels" and (shape[4] != 3 or shape[2] % ratio or shape[3] % ratio):
        raise InvalidRequest(
            f"pixels of shape {list(shape)}: this VAE takes [batch, frames, height, width, 3] "
            f"with a height and a width that are multiples of {ratio}"
        )


def decode(vae: Any, latent: Tensor, tick: Tick) -> Tensor:
    """Latents ``[B, C, T, H, W]`` to pixels ``[B, T', H', W', 3]``, float32 in 0..1 on the CPU.

    The decoder gives the frames of one latent frame at a time; each goes straight to its place, so that the
    video is never held twice.
    """
    batch, _, frames, _, _ = latent.shape
    writer = _FrameWriter(batch, frames, 2 ** sum(vae.config.temperal_downsample), tick)
    handle = vae.decoder.register_forward_hook(writer.take)
    try:
        for sample in latent.to(vae.dtype):
            vae.decode(sample[None], return_dict=False)
    finally:
        handle.remove()
        vae.clear_cache()
    return writer.pixels


def encode(vae: Any, pixels: Tensor, tick: Tick) -> Tensor:
    """Pixels ``[B, T, H, W, 3]`` in 0..1 to the posterior's mode ``[B, C, T', H', W']``, float32.

    ``T' = 1 + (T - 1) // 4``; as in ComfyUI, frames beyond the last group of four are left out.
    """
    total = pixels.shape[0] * (1 + (pixels.shape[1] - 1) // 4)
    counter = iter(range(1, total + 1))
    handle = vae.encoder.register_forward_hook(lambda *_: tick(next(counter), total))
    try:
        scaled = (sample[None].to(vae.dtype).permute(0, 4, 1, 2, 3) * 2.0 - 1.0 for sample in pixels)
        return torch.cat([vae.encode(video, return_dict=False)[0].mode() for video in scaled]).float()
    finally:
        handle.remove()
        vae.clear_cache()


class _FrameWriter:
    def __init__(self, batch: int, frames: int, ratio: int, tick: Tick) -> None:
        self.batch, self.frames, self.ratio, self.tick = batch, frames, ratio, tick
        self.done = 0
        self.pixels = torch.empty(0)

    def take(self, _module: object, _inputs: object, chunk: Tensor) -> Tensor:
        """Write a chunk ``[1, 3, t, H, W]``; what goes on through diffusers' code is emptied."""
        sample, frame = divmod(self.done, self.frames)
        if not self.done:
            length = 1 + (self.frames - 1) * self.ratio
            self.pixels = torch.empty(self.batch, length, *chunk.shape[3:], 3)
        start = 1 + (frame - 1) * self.ratio if frame else 0
        target = self.pixels[sample, start : start + chunk.shape[2]]
        target.copy_(((chunk[0].float() + 1.0) / 2.0).clamp_(0.0, 1.0).permute(1, 2, 3, 0))
        self.done += 1
        self.tick(self.done, self.batch * self.frames)
        return chunk[:, :, :0]
