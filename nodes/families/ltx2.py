"""The bridge between ComfyUI's LTXAVModel and diffusers' transformer, for LTX-2, 2.3 and 2.5."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import comfy.ldm.lightricks.av_model as av_model
import torch
from comfy.ldm.lightricks.symmetric_patchifier import AudioPatchifier, SymmetricPatchifier, latent_to_pixel_coords
from einops import rearrange
from torch import Tensor

from ...parallel_backend.checkpoint.weight_headers import read_files
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, MetaWeights, pop_text
from ..bridges.refusals import layers_unavailable
from .ltx import SCALE, frame_rates, unweighted
from .ltx2_connectors import CONNECTORS, PROJECTIONS, TextConnectors
from .ltx2_guides import guide_inputs

_HEARS_FIRST = "vx_norm3" not in av_model.BasicAVTransformerBlock.forward.__code__.co_varnames
"""Whether in this version of ComfyUI the sound attends to the picture after the picture has attended to the sound."""

PATCHIFIER, AUDIO_PATCHIFIER = SymmetricPatchifier(1, start_end=True), AudioPatchifier(1, start_end=True)

_TEXT_WIDTHS = ("cross_attention_dim", "audio_cross_attention_dim")
"""Widths of the text where the ranks do not project it (2.3, 2.5)."""

_SWITCHES = ("run_vx", "run_ax")
"""Options with which a node switches a whole stream off."""

_ACROSS = ("a2v_cross_attn", "v2a_cross_attn")
"""Options with which LTXVModalityGuidance lets picture and sound not hear and see each other."""

_PASS_ON = "stg_skip_self_attn"
"""Option with which the self-attention of all layers passes on its values."""

_PASSES_ON = _PASS_ON in av_model.CrossAttention.forward.__code__.co_consts
"""Whether this version of ComfyUI knows it."""

_BY_OTHER = hasattr(av_model, "CompressedTimestep")
"""Whether this version of ComfyUI gates attention to the other stream by the other stream's timesteps."""


class LTX2(Bridge):
    """LTX-2's bridge."""

    native_class = av_model.LTXAVModel
    text = CoreText(components={"text_encoder": ()}, clip_type="LTXV")  # its projection is in the model's single file
    vaes = ("AutoencoderKLLTXVideo",)
    latents: ClassVar = ("hidden_states", "audio_hidden_states")
    latents_maker = "LTXVConcatAVLatent"

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``. ComfyUI reads most of it from a single file's metadata, which becomes part of it."""
        config = self.config
        found = {name: config[name] for name in ("num_layers", "attention_head_dim", "cross_attention_dim")}
        found |= {"image_model": "ltxav"} | (self._said or self._settings())
        marked = {"use_keyframes_abs_pos_embedding": True} if config.get("use_keyframes_abs_pos_embedding") else {}
        return found | marked

    @cached_property
    def _said(self) -> dict[str, Any]:
        """What a single file's metadata says about the transformer."""
        if not self.checkpoint.path.is_file():
            return {}
        metadata = read_files(self.checkpoint.stored("transformer").files).metadata
        said: dict[str, Any] = json.loads(metadata.get("config", "{}")).get("transformer", {})
        return {name: value for name, value in said.items() if name != "use_keyframes_abs_pos_embedding"}

    def _settings(self) -> dict[str, Any]:
        """Return what the metadata of a published file would say, for a folder in diffusers layout."""
        config, projects = self.config, self.config["use_prompt_embeddings"]
        same = (
            "in_channels", "num_attention_heads", "caption_channels", "audio_in_channels", "audio_num_attention_heads",
            "audio_attention_head_dim", "audio_cross_attention_dim", "rope_type", "timestep_scale_multiplier",
        )  # fmt: skip
        newer = {name: config[name] for name in ("ff_bias", "audio_ff_bias", "use_prompt_adaln_single")}
        return {name: config[name] for name in same} | {
            "frequencies_precision": "float64" if config["rope_double_precision"] else "float32",
            "av_ca_timestep_scale_multiplier": config["cross_attn_timestep_scale_multiplier"],
            "apply_gated_attention": config["gated_attn"],
            "cross_attention_adaln": config["cross_attn_mod"],
            "causal_temporal_positioning": True,
            "use_middle_indices_grid": True,
            "caption_proj_before_connector": not projects,
            "caption_projection_first_linear": False,
            **self._connector_widths(),
            **{name: value for name, value in newer.items() if not value},
        }

    def _connector_widths(self) -> dict[str, Any]:
        """Return the widths of the text connectors, which follow from those of the text that they make."""
        config = self.config
        if config["use_prompt_embeddings"]:
            width = config["caption_channels"] // 30
            return {"connector_num_attention_heads": 30, "connector_attention_head_dim": width}
        heads, audio_heads = config["num_attention_heads"], config["audio_num_attention_heads"]
        return {
            "connector_num_attention_heads": heads,
            "connector_attention_head_dim": config["cross_attention_dim"] // heads,
            "audio_connector_num_attention_heads": audio_heads,
            "audio_connector_attention_head_dim": config["audio_cross_attention_dim"] // audio_heads,
            "connector_apply_gated_attention": True,
        }

    def check(self) -> None:
        """See ``Bridge``."""
        if self.checkpoint.path.is_file() and not self._said.get("use_middle_indices_grid"):
            raise InvalidRequest(
                f"{self.name} does not say how LTX-2 places its tokens (the metadata's config of the transformer is "
                "missing): choose the published file, or one that was saved with its metadata"
            )
        super().check()
        known = inspect.signature(self.native_class).parameters
        newer = {"apply_gated_attention": True, "cross_attention_adaln": True, "ff_bias": False}
        missing = [name for name, value in newer.items() if name not in known and self.unet_config().get(name) is value]
        if missing:
            raise InvalidRequest(
                f"{self.name}: this version of ComfyUI has no LTX-2 with {missing[0]}; ComfyUI 0.27.0 has 2.3, and "
                "0.33.0 has 2.5, too"
            )

    def weights(self, module: Any) -> MetaWeights:
        """See ``Bridge``."""
        found = super().weights(module)
        layers = CONNECTORS if self.config["use_prompt_embeddings"] else (*CONNECTORS, *PROJECTIONS)
        return replace(found, here=frozenset(name for name in found.tensors if name.partition(".")[0] in layers))

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def option_inputs(self, transformer_options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``.

        Raises:
            InvalidRequest: an option needs the layers in this process.
        """
        for option in _SWITCHES:
            if not transformer_options.get(option, True):
                raise layers_unavailable(f"a node switches the layers of the picture or the sound off ({option})")
        inputs: dict[str, Tensor] = {}
        shares = [float(bool(transformer_options.get(option, True))) for option in _ACROSS]
        if 0.0 in shares:
            inputs["across_shares"] = torch.tensor([shares])
        layers = range(self.config["num_layers"])
        of_all = _PASSES_ON and transformer_options.get(_PASS_ON)
        if passed := layers if of_all else transformer_options.get("stg_self_attn_blocks"):
            inputs["attending_layers"] = torch.tensor([[float(i not in passed) for i in layers]])
        return inputs

    def inputs(self, x: Any, timestep: Any, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. Masks give the factors of each token's timestep."""
        picture, sound = x
        call_args.pop("latent_shapes", None)
        keyframes, mask = call_args.pop("keyframe_idxs", None), call_args.pop("denoise_mask", None)
        guides = call_args.pop("guide_attention_entries", None)
        coords = _video_coords(picture, keyframes)
        inputs = {
            "hidden_states": picture,
            "audio_hidden_states": sound,
            "frame_rate": frame_rates(call_args, len(picture)),
            "video_coords": coords.float(),
        } | ({"heard_share": torch.ones(len(picture))} if _HEARS_FIRST else {})
        inputs |= self._texts(pop_text(call_args))
        if "attention_mask" in call_args:
            inputs["encoder_attention_mask"] = call_args.pop("attention_mask").bool()
        sound_timestep = call_args.pop("a_timestep", timestep)  # ComfyUI's ``forward`` splits the pair
        inputs |= _times(timestep, sound_timestep, mask, call_args.pop("audio_denoise_mask", None))
        if keyframes is not None and keyframes.shape[2]:
            inputs |= guide_inputs(self.native_class, picture.shape, keyframes.shape[2], mask, guides or ())
        generated = call_args.pop("generated_keyframes", None)
        if self.config.get("use_keyframes_abs_pos_embedding"):
            inputs["keyframes_mask"] = self._single_frames(picture, coords, keyframes, generated)
        return inputs | _reference(call_args.pop("ref_audio", None))

    def _texts(self, context: Tensor) -> dict[str, Tensor]:
        """Return the picture's text and the sound's, which lie side by side."""
        names = ("caption_channels",) * 2 if self.config["use_prompt_embeddings"] else _TEXT_WIDTHS
        widths = [self.config[name] for name in names]
        if context.shape[-1] != sum(widths):
            raise InvalidRequest(
                f"the prompt has {context.shape[-1]} features, and this LTX-2 takes {sum(widths)}: encode it with the "
                "text encoder of this model"
            )
        return dict(
            zip(("encoder_hidden_states", "audio_encoder_hidden_states"), context.split(widths, -1), strict=True)
        )

    def _single_frames(self, picture: Tensor, coords: Tensor, keyframes: Tensor | None, generated: Any) -> Tensor:
        """Return which tokens are of a single video frame, as ComfyUI finds them."""
        native: Any = self.native_class
        holder = SimpleNamespace(patchifier=PATCHIFIER)
        holder.tokens_per_latent_frame = partial(native.tokens_per_latent_frame, holder)
        guides, shape = 0 if keyframes is None else keyframes.shape[2], list(picture.shape)
        mask: Tensor = native.keyframes_abs_pos_mask(holder, coords.clone(), shape, None, guides, generated)
        return mask

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], temporal=SCALE[0], spatial=SCALE[1])

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``. Versions of ComfyUI whose text encoder runs the connectors do not ask for them."""
        return {
            "patchifier": PATCHIFIER,
            "a_patchifier": AUDIO_PATCHIFIER,
            "preprocess_text_embeds": TextConnectors(self.native_class, self.checkpoint, self.unet_config()),
        }


def _video_coords(picture: Tensor, keyframes: Tensor | None) -> Tensor:
    """Return where each token starts and ends in the video, ``[B, 3, S, 2]``. The keyframes' tokens come last."""
    _, latent_coords = PATCHIFIER.patchify(picture)
    coords: Tensor = latent_to_pixel_coords(latent_coords, SCALE, causal_fix=True).float()
    if keyframes is None or not keyframes.shape[2]:
        return coords
    count = keyframes.shape[2]
    given = keyframes.to(coords).expand(len(coords), -1, -1, -1)
    return torch.cat([coords[:, :, : coords.shape[2] - count], given], dim=2)


def _times(times: Tensor, sound_times: Tensor, mask: Tensor | None, sound_mask: Tensor | None) -> dict[str, Tensor]:
    """Return the timestep, and the weights of tokens where masks give them."""
    weights, given = dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
    if mask is not None:
        weights["token_weights"] = rearrange(PATCHIFIER.patchify(mask[:, :1])[0], "b s 1 -> b s").clamp(min=0.0)
        given.append((rearrange(times, "b s 1 -> b s"), weights["token_weights"]))
    if sound_mask is not None:
        tokens, _ = AUDIO_PATCHIFIER.patchify(sound_mask[:, :1, :, :1])
        weights["audio_token_weights"] = rearrange(tokens, "b s 1 -> b s")
        given.append((rearrange(sound_times, "b s 1 -> b s"), weights["audio_token_weights"]))
    if len(given) == 1:  # the other one's is the timestep itself
        time = sound_times if sound_mask is None else times
    elif given:
        time = unweighted(torch.cat([each for each, _ in given], dim=1), torch.cat([each for _, each in given], dim=1))
    else:
        time = times
    largest = [weights[name].max() if name in weights else torch.tensor(1.0) for name in _WEIGHTS]
    gates = {"gate_weights": torch.stack([each.float().cpu() for each in largest])[None]} if _BY_OTHER else {}
    return {"timestep": time, **weights, **gates}


_WEIGHTS = ("token_weights", "audio_token_weights")


def _reference(reference: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the tokens of a voice to imitate, and their times, which end before the sound begins, as in ComfyUI."""
    if reference is None:
        return {}
    tokens, patchifier = reference["tokens"], AUDIO_PATCHIFIER
    first, last = (
        patchifier._get_audio_latent_time_in_sec(start, start + tokens.shape[1], torch.float32, torch.device("cpu"))
        for start in (0, 1)
    )
    of_one = patchifier.hop_length * patchifier.audio_latent_downsample_factor / patchifier.sample_rate
    offset = last[-1].item() + of_one
    return {"reference_sound": tokens, "reference_seconds": torch.stack([first - offset, last - offset], dim=-1)[None]}
