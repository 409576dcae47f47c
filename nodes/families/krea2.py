"""The bridge between ComfyUI's and diffusers' transformers of Krea-2 (Raw and Turbo)."""

import inspect
from types import SimpleNamespace
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
        probe = _packing_probe(self.native_class)
        self.native_class._forward(probe, x, timestep, x.new_zeros(len(x), 0, 1), **references)
        image_tokens = -(-x.shape[-2] // PATCH) * -(-x.shape[-1] // PATCH)
        tokens, ids = probe.tokens[:, image_tokens:], probe.ids[:, image_tokens:]
        if not tokens.shape[1]:
            return {}
        own_timestep = {"reference_timestep": timestep * 0} if probe.timestep_zero else {}
        return {"reference": tokens, "reference_ids": ids, **own_timestep}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)


def _packing_probe(native_class: type[Any]) -> Any:
    """Return a stub for ComfyUI's transformer, which keeps what its first layer and its first block would get.

    After ``_forward`` it has ``tokens`` ``[B, S, C]``, their positions ``ids`` ``[B, S, 3]``, and ``timestep_zero``,
    whether the references would have a timestep of 0.
    """
    probe = SimpleNamespace(patch=PATCH, tdim=PATCH, default_ref_method=None)

    def first(tokens: Tensor) -> Tensor:
        probe.tokens, probe.channels = tokens, tokens.shape[-1] // PATCH**2
        return tokens

    def pe_embedder(ids: Tensor) -> Tensor:
        probe.ids = ids
        return ids

    def block(tokens: Tensor, *_: Any, timestep_zero_index: int | None = None, **__: Any) -> Tensor:
        probe.timestep_zero = timestep_zero_index is not None
        return tokens

    def unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def text(context: Tensor) -> Tensor:
        return context.new_zeros(len(context), 0, probe.tokens.shape[-1])

    probe.first, probe.pe_embedder, probe.blocks = first, pe_embedder, (block,)
    probe.tmlp = probe.tproj = probe.txtfusion = probe.last = probe._unpack_context = unchanged
    probe.txtmlp = text
    probe.process_img = lambda *args, **kwargs: native_class.process_img(probe, *args, **kwargs)
    return probe
