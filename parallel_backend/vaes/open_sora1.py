"""Open-Sora 1.2's VAE. It shortens chunks of 17 frames to 5, each for itself."""

from typing import Any, ClassVar

from torch import Tensor

from .base import VAE, LatentScale, Scaling, UnitDone, WriteFrames

_CHUNK = 17


class OpenSora1(VAE):
    """``VideoAutoencoderPipeline``. ComfyUI has no VAE of it: its latents are here what the transformer takes."""

    own_module: ClassVar[str] = "open_sora1_module"
    writes_each_unit = True

    @property
    def scale(self) -> LatentScale:
        levels, halved = self.config.get("block_out_channels", range(4)), self.config.get("temporal_downsample")
        return LatentScale(
            channels=self.config.get("latent_embed_dim", 4),
            spatial=2 ** (len(levels) - 1),
            temporal=2 ** sum(halved if halved is not None else (False, True, True)),
        )

    @property
    def scaling(self) -> Scaling | None:
        return None

    @property
    def _chunk(self) -> tuple[int, int]:
        """Pixel frames and latent frames of a whole chunk."""
        size = int(self.config.get("micro_frame_size", _CHUNK))
        return size, -(-size // self.scale.temporal)

    def independent_frames(self, frames: int, *, encode: bool) -> tuple[int, ...]:
        """Return the lengths of the chunks. Every chunk has norms and zeros of its own."""
        whole, rest = divmod(frames, self._chunk[0 if encode else 1])
        return (self._chunk[0 if encode else 1],) * whole + ((rest,) if rest else ())

    def latent_frames(self, frames: int) -> int:
        chunks, rest = divmod(frames, self._chunk[0])
        return chunks * self._chunk[1] - (-rest // self.scale.temporal)

    def pixel_frames(self, frames: int) -> int:
        """Return how many pixel frames ``frames`` latent frames decode to.

        A whole chunk of 5 gives 17. The rest of n frames gives 4 (n - 1) + 1, so one alone is an image. The authors'
        code asks for the number instead, and takes up to 3 more.
        """
        size, latents = self._chunk
        chunks, rest = divmod(frames, latents)
        return chunks * size + (self.scale.temporal * (rest - 1) + 1 if rest else 0)

    def encoded_frames(self, frames: int) -> int:
        """Return ``frames``: zeros in front fill up the last group."""
        return frames

    def decode_progress_units(self, module: Any, frames: int) -> int:
        return self.pixel_frames(frames)

    def encode_progress_units(self, module: Any, frames: int) -> int:
        return frames

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        """Decode one latent ``[1, C, T, H, W]``, and write each frame as soon as it is decoded."""

        def write_frame(frame: Tensor) -> None:
            write(frame)
            unit_done()

        module.decode_frames(latent, self.pixel_frames(latent.shape[2]), write_frame)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        latent: Tensor = module.encode(pixels, unit_done)
        return latent
