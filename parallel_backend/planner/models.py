"""Models that can be planned for without their files: published ones, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..checkpoint.opening import open_checkpoint
from ..errors import InvalidRequest
from ..families.registry import FAMILIES, family_of
from ..vaes import VAES


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the planner needs of a model.

    Attributes:
        name: what a person calls it.
        class_name: of its transformer's module.
        config: of the transformer; what it leaves out is the family's default.
        variant: the family's variant whose inputs a request has; "" for the first whose inputs fit.
        text: text tokens of a prompt.
        vae: class of its VAE; "" for none.
        vae_config: of the VAE.
        experts: number of transformers, of which one computes at a time.
        path: of its file or folder; None if it is known by name alone.
    """

    name: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    text: int = 512
    vae: str = ""
    vae_config: Mapping[str, Any] = field(default_factory=dict)
    experts: int = 1
    path: Path | None = None

    def latent_size(self, width: int, height: int, frames: int) -> tuple[int, ...]:
        """Return the size of the latent of a picture, or of a video of so many frames.

        Raises:
            InvalidRequest: the model makes no such pictures.
        """
        geometry = family_of(self.class_name).describe(self.config)
        if not self.vae:
            scale, temporal, video = 8, 4, len(geometry.patch) == 3
        else:
            found = VAES[self.vae](self.vae_config).scale
            scale, temporal, video = found.spatial, found.temporal, len(geometry.patch) == 3
        if frames > 1 and not video:
            raise InvalidRequest(f"{frames} frames: {self.name} makes single pictures, so 1 frame would work")
        if min(width, height) < scale:
            raise InvalidRequest(f"{width}x{height} is smaller than one position of {self.name}'s latent, {scale}")
        size = (height // scale, width // scale)
        if not video:
            return size
        return (self._latent_frames(frames, temporal), *size)

    def _latent_frames(self, frames: int, temporal: int) -> int:
        if self.vae:
            return VAES[self.vae](self.vae_config).latent_frames(frames)
        return 1 + (frames - 1) // temporal


_IMAGE_VAE = {
    "latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_WAN = "WanTransformer3DModel"
_MODELS = (
    Model(name="flux", class_name="FluxTransformer2DModel", config={"guidance_embeds": True}, variant="dev",
          vae="AutoencoderKL", vae_config=_IMAGE_VAE),
    Model(name="sd3.5-medium", class_name="SD3Transformer2DModel", text=333, vae="AutoencoderKL",
          vae_config=_IMAGE_VAE),
    Model(name="qwen-image", class_name="QwenImageTransformer2DModel", text=256, vae="AutoencoderKLQwenImage"),
    Model(name="z-image", class_name="ZImageTransformer2DModel", text=256, vae="AutoencoderKL", vae_config=_IMAGE_VAE),
    Model(name="hunyuan-video", class_name="HunyuanVideoTransformer3DModel", variant="t2v", text=256,
          vae="AutoencoderKLHunyuanVideo"),
    Model(name="wan2.1-t2v-14b", class_name=_WAN, variant="t2v", vae="AutoencoderKLWan"),
    Model(name="wan2.1-t2v-1.3b", class_name=_WAN, variant="t2v", vae="AutoencoderKLWan",
          config={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
    Model(name="wan2.1-i2v-14b-480p", class_name=_WAN, variant="i2v 2.1", vae="AutoencoderKLWan",
          config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}),
    Model(name="wan2.2-t2v-a14b", class_name=_WAN, variant="t2v", vae="AutoencoderKLWan", experts=2),
    Model(name="cogvideox-5b", class_name="CogVideoXTransformer3DModel", text=226, vae="AutoencoderKLCogVideoX",
          config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
                  "sample_frames": 49}, variant="5b"),
    Model(name="open-sora-2.0", class_name="OpenSora2Transformer3DModel", vae="AutoencoderKLHunyuanVideo"),
    Model(name="open-sora-1.2", class_name="STDiT3", text=300, vae="VideoAutoencoderPipeline"),
    Model(name="minimax-h3", class_name="MiniMaxH3Transformer3DModel", vae="AutoencoderKLMiniMaxH3",
          config={"rope_freq_dim": 16, "num_refiner_layers": 2}),
)  # fmt: skip
PUBLISHED: Mapping[str, Model] = {model.name: model for model in _MODELS}
"""By the name on the command line. The numbers are those of the models' own config files."""


def find(name: str) -> Model:
    """Return a published model by its name, or the one of a file or folder.

    Raises:
        InvalidRequest: there is none, or it cannot be planned for.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    path = Path(name)
    if not path.exists():
        raise InvalidRequest(
            f"{name} is neither a file nor a folder, and no model that is known by name; known: {', '.join(PUBLISHED)}"
        )
    return of_checkpoint(path)


def of_checkpoint(path: Path) -> Model:
    """Return the model of a checkpoint, by its headers.

    Raises:
        InvalidRequest: the backend does not support it.
    """
    return of(open_checkpoint(path))


def of(checkpoint: Checkpoint) -> Model:
    """Return the model of an open checkpoint.

    Raises:
        InvalidRequest: the backend does not support it.
    """
    if HIGH_NOISE not in checkpoint.components or checkpoint.components[HIGH_NOISE] not in FAMILIES:
        found = checkpoint.components.get(HIGH_NOISE, "no transformer")
        raise InvalidRequest(
            f"{checkpoint.name} has {found}, which cannot be planned for; supported: {', '.join(FAMILIES)}"
        )
    vae = checkpoint.components.get("vae", "")
    return Model(
        name=checkpoint.name, class_name=checkpoint.components[HIGH_NOISE], config=checkpoint.config(HIGH_NOISE),
        vae=vae if vae in VAES else "", vae_config=checkpoint.config("vae") if vae in VAES else {},
        experts=1 + (LOW_NOISE in checkpoint.components), path=checkpoint.path,
    )  # fmt: skip
