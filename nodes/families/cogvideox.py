"""The bridges between ComfyUI and diffusers' CogVideoX (2B, 5B and 1.5, text and image to video).

Newer versions of ComfyUI have a class for CogVideoX, which the bridge uses for 1.5. Otherwise it uses a custom model
class: in older versions of ComfyUI, and for 2B and 5B, which ComfyUI's class does not compute as they were trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import comfy.latent_formats
import comfy.supported_models
import torch
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.single_file import SingleFile
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, Bridge, non_default, pop_text, split_channels
from ..bridges.custom_model import DDIM_DEFAULTS, CustomBridge, CustomModel
from ..bridges.refusals import INPAINTING_CONDS

CHANNELS = 16
SCALE = LatentScale(channels=CHANNELS, temporal=4, spatial=8)
TEXT = BackendText(key="t5xxl", length=226, encoder="T5EncoderModel", masked=False)
VAES = ("AutoencoderKLCogVideoX",)


class CogVideoXModel(CustomModel):
    """Concatenates an image's latent with the noise if the transformer has channels for it."""

    concat_keys: tuple[str, ...]  # type: ignore[assignment, unused-ignore]

    @override
    def concat_cond(self, **conditioning: Any) -> Tensor | None:
        """Return the image's latent ``[B, 16, T, H, W]``, zero in unknown frames.

        ComfyUI's nodes pass the latent of the known frames, or of all frames with a mask that is 1 in unknown ones.

        Raises:
            InvalidRequest: the image is missing, or the model does not take one.
        """
        image, bridge = conditioning.get("concat_latent_image"), self.model_config.bridge
        if image is None and bridge.takes_image:
            raise InvalidRequest(
                f"{bridge.name} makes a video from an image: give the image to both prompts, for example with "
                "InstructPixToPixConditioning and the VAE of Parallel Loader"
            )
        if image is not None and not bridge.takes_image:
            raise InvalidRequest(
                f"{bridge.name} makes a video from a prompt only: remove the node that adds concat_latent_image"
            )
        if image is None:
            return None
        self.concat_keys = ("concat_image", "mask_inverted")
        conditioning.setdefault("concat_mask", torch.zeros_like(conditioning["noise"][:, :1]))
        image_and_mask: Tensor = super().concat_cond(**conditioning)
        image_latent, known = image_and_mask[:, :CHANNELS], image_and_mask[:, CHANNELS:]
        concat: Tensor = image_latent * known * bridge.image_factor
        return concat


class CogVideoX(CustomBridge):
    """The bridge with a custom model class."""

    model_class = CogVideoXModel
    # The defaults of diffusers' CogVideoXDDIMScheduler.
    scheduler_defaults = DDIM_DEFAULTS | {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "snr_shift_scale": 3.0,
    }
    default_scaling_factor = 1.15258426
    supported_conds = INPAINTING_CONDS
    vaes = VAES
    text = TEXT

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Bridge:
        """See ``Bridge``. ComfyUI's own class is used if it exists and fits the checkpoint.

        Raises:
            InvalidRequest: it cannot be used, and a file lacks the noise schedule that the custom class needs.
        """
        if NativeCogVideoX.fits(checkpoint):
            return NativeCogVideoX(checkpoint)
        if isinstance(checkpoint, SingleFile):
            raise InvalidRequest(
                f"{checkpoint.path.name}: this version of ComfyUI has no CogVideoX, and a file does not hold the noise "
                "schedule: choose the model's folder in diffusers layout, or update ComfyUI"
            )
        return cls(checkpoint)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.text = _text(self.config)

    @property
    def takes_image(self) -> bool:
        """Whether the model makes a video from an image."""
        return bool(self.config["in_channels"] > CHANNELS)

    @property
    def image_factor(self) -> float:
        """An additional factor of an image's latent, beside the scaling factor of all latents.

        1.5's image to video divides the image's latent by the VAE's scaling factor instead of multiplying by it.
        """
        inverted = self.vae is not None and self.vae.config.get("invert_scale_latents")
        return self.scaling_factor() ** -2 if inverted else 1.0

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        _check_channels(self, (CHANNELS, 2 * CHANNELS))

    def latent_format(self) -> Any:
        """See ``CustomBridge``."""
        latent_format = comfy.latent_formats.LatentFormat()
        latent_format.scale_factor = self.scaling_factor()
        latent_format.latent_channels, latent_format.latent_dimensions = CHANNELS, 3
        return latent_format

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. 1.5 takes latent frames in pairs."""
        frames, step = x.shape[2], self.config.get("patch_size_t") or 1
        if frames % step:
            rounded = frames + step - frames % step
            raise InvalidRequest(
                f"a latent of {frames} frames: {self.name} takes a multiple of {step}. Make a video of "
                f"{4 * rounded - 3} frames, whose latent has {rounded}"
            )
        return split_channels(x, CHANNELS) | {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return SCALE


class NativeCogVideoX(Bridge):
    """The bridge with ComfyUI's own class: text to video, image to video and inpainting (VOID) of 1.5.

    The class takes latents of unit variance, which only ComfyUI's *VOIDSampler* passes. Every other sampler, and
    Parallel Sampler, needs *ModelSamplingDiscrete* with v_prediction and zsnr.
    """

    supported_conds = frozenset({"concat_latent_image"})
    vaes = VAES
    text = TEXT

    @property
    def native_class(self) -> type[Any]:  # type: ignore[override]
        """See ``Bridge``. Older versions of ComfyUI lack the module."""
        import comfy.ldm.cogvideo.model as core  # type: ignore[import-not-found, unused-ignore]

        native_class: type[Any] = core.CogVideoXTransformer3DModel
        return native_class

    @staticmethod
    def fits(checkpoint: Checkpoint) -> bool:
        """Whether this ComfyUI has CogVideoX and computes the checkpoint as it was trained.

        ComfyUI 0.27 does so for 1.5 alone: it detects the 2B's fixed positions as rotary ones, lacks the 2B's
        ``snr_shift_scale``, and multiplies the 5B's positions by 1.875.
        """
        exists = hasattr(comfy.supported_models, "CogVideoX_T2V")
        return exists and checkpoint.config("transformer").get("patch_size_t") is not None

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.text = _text(self.config)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        unet_config = {
            "image_model": "cogvideox",
            "num_attention_heads": config["num_attention_heads"],
            "attention_head_dim": config["attention_head_dim"],
            "time_embed_dim": config["time_embed_dim"],
            "num_layers": config["num_layers"],
            "patch_size": config["patch_size"],
            "patch_size_t": config["patch_size_t"],
            "in_channels": config["in_channels"],
            "text_embed_dim": config["text_embed_dim"],
            "use_learned_positional_embeddings": bool(config.get("use_learned_positional_embeddings")),
            "use_rotary_positional_embeddings": bool(config.get("use_rotary_positional_embeddings")),
        }
        unet_config |= {"ofs_embed_dim": config["ofs_embed_dim"]} if config.get("ofs_embed_dim") else {}
        not_inferred = {
            name: config[name] for name in ("out_channels", "flip_sin_to_cos", "freq_shift") if name in config
        }
        return unet_config | non_default(self.native_class, not_inferred)

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        _check_channels(self, (CHANNELS, 2 * CHANNELS, 3 * CHANNELS))

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        inputs = split_channels(x, CHANNELS) | {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        return inputs | ({"ofs": call_args.pop("ofs")} if "ofs" in call_args else {})

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return SCALE

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"in_channels": self.config["in_channels"], "ofs_proj_dim": self.config.get("ofs_embed_dim")}


def _text(config: Mapping[str, Any]) -> BackendText:
    return replace(TEXT, length=config.get("max_text_seq_length", TEXT.length))


def _check_channels(bridge: Bridge, in_channels: tuple[int, ...]) -> None:
    """Refuse a model that takes other numbers of channels than ``in_channels`` or does not predict 16."""
    channels = (bridge.config["in_channels"], bridge.config.get("out_channels", CHANNELS))
    if channels[0] not in in_channels or channels[1] != CHANNELS:
        raise InvalidRequest(
            f"{bridge.name} takes {channels[0]} channels and predicts {channels[1]}; supported are CogVideoX models "
            f"that take {' or '.join(map(str, in_channels))} and predict {CHANNELS}"
        )
