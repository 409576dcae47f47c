"""The bridge between ComfyUI's and diffusers' transformers of Krea-2 (Raw and Turbo)."""

import inspect
from functools import partial
from typing import Any

import comfy.supported_models
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, non_default, pop_text

PATCH = 2


class Krea2(Bridge):
    """Krea-2's bridge. Latents have a frame dim of length 1, and the VAE is Qwen-Image's."""

    text = CoreText(components={"text_encoder": ("Qwen3VLModel", "Qwen3VLForConditionalGeneration")}, clip_type="KREA2")
    vaes = ("AutoencoderKLQwenImage", "AutoencoderKLWan")  # the layers are the same: a single file does not tell which

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Bridge:
        """See ``Bridge``.

        Raises:
            InvalidRequest: this version of ComfyUI does not have the family.
        """
        if not hasattr(comfy.supported_models, "Krea2"):
            raise InvalidRequest(
                f"{checkpoint.name}: this version of ComfyUI has no Krea-2; ComfyUI 0.27.0 and newer have it"
            )
        return cls(checkpoint)

    @property
    def native_class(self) -> type[Any]:  # type: ignore[override]
        """See ``Bridge``. Older versions of ComfyUI lack the module."""
        import comfy.ldm.krea2.model as core  # type: ignore[import-not-found, unused-ignore]

        native_class: type[Any] = core.SingleStreamDiT
        return native_class

    @property
    def supported_conds(self) -> frozenset[str]:
        """See ``Bridge``. Older versions of ComfyUI's class have no reference images."""
        takes_references = "ref_latents" in inspect.signature(self.native_class.forward).parameters
        return frozenset({"reference_latents"}) if takes_references else frozenset()

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        heads = config["num_attention_heads"]
        unet_config = {
            "image_model": "krea2",
            "features": heads * config["attention_head_dim"],
            "channels": config["in_channels"] // PATCH**2,
            "patch": PATCH,
            "layers": config["num_layers"],
            "heads": heads,
            "kvheads": config.get("num_key_value_heads") or heads,
            "txtlayers": config["num_text_layers"],
            "txtdim": config["text_hidden_dim"],
        }
        not_inferred = {
            "theta": config.get("rope_theta", 1e3),
            "tdim": config.get("timestep_embed_dim", 256),
            "txtheads": config.get("text_num_attention_heads", 20),
            "txtkvheads": config.get("text_num_key_value_heads", 20),
        }
        return unet_config | non_default(self.native_class, not_inferred)

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI flattens the layers of the text encoder."""
        text, layers = pop_text(call_args), (self.config["num_text_layers"], self.config["text_hidden_dim"])
        if text.shape[-1] != layers[0] * layers[1]:
            raise InvalidRequest(
                f"the conditioning has {text.shape[-1]} features, and {self.name} takes {layers[0] * layers[1]}, "
                f"{layers[0]} layers of Qwen3-VL: encode the prompt with Load CLIP of type krea2"
            )
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": text.unflatten(-1, layers)}
        return inputs | self._pop_references(x, timestep, call_args)

    def _pop_references(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """Remove the reference images from a call's arguments and return their tokens and positions.

        ComfyUI's own forward packs and places them, and leaves them out if no method is chosen.
        """
        names = ("ref_latents", "ref_latents_method")
        references: dict[str, Any] = {name: call_args.pop(name) for name in names if name in call_args}
        if not references.get("ref_latents"):
            return {}
        probe: Any = _PackingProbe(self.native_class, self.config["in_channels"])
        text = x.new_zeros(len(x), 0, self.config["in_channels"])
        self.native_class._forward(probe, x, timestep, text, **references)
        image_tokens = -(-x.shape[-2] // PATCH) * -(-x.shape[-1] // PATCH)
        tokens, ids = probe.tokens[:, image_tokens:], probe.ids[:, image_tokens:]
        if not tokens.shape[1]:
            return {}
        own_timestep = {"reference_timestep": timestep * 0} if probe.timestep_zero else {}
        return {"reference": tokens, "reference_ids": ids, **own_timestep}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)


class _PackingProbe:
    """Stub for ComfyUI's transformer, whose layers return their input, and which keeps what its blocks would get.

    Attributes:
        tokens: packed tokens ``[B, S, in_channels]`` of the latent and the references.
        ids: their positions ``[B, S, 3]``.
        timestep_zero: whether the references would have a timestep of 0.
    """

    patch = tdim = PATCH
    default_ref_method = None

    def __init__(self, native_class: type[Any], in_channels: int) -> None:
        self.channels = in_channels // PATCH**2
        self.process_img = partial(native_class.process_img, self)
        self.blocks = (self._block,)

    def first(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the input."""
        return tokens

    _unpack_context = txtfusion = txtmlp = tmlp = tproj = last = first

    def pe_embedder(self, ids: Tensor) -> Tensor:
        """Keep the positions."""
        self.ids = ids
        return ids

    def _block(self, tokens: Tensor, *_: Any, timestep_zero_index: int | None = None, **__: Any) -> Tensor:
        """Keep the tokens."""
        self.tokens, self.timestep_zero = tokens, timestep_zero_index is not None
        return tokens
