"""The bridge between ComfyUI's and diffusers' transformers of MiniMax-H3, which make videos with sound."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import comfy.supported_models
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.announcements import announce_dense
from ..bridges.bridge import Bridge, CoreText, non_default, pop_text

SHIFTS = ("sigma_shift_video", "sigma_shift_audio")
"""Attributes of ComfyUI's class, and with ``minimax_h3_`` before them the options that replace them in a sampling."""

PICTURES, SOUNDS = frozenset({"cond", "ref_img"}), frozenset({"cond_audio", "ref_audio"})
"""Kinds of given rows in ComfyUI's layout: keyframes and references."""


class MiniMaxH3(Bridge):
    """MiniMax-H3's bridge. Latents are nested: the video's and the sound's."""

    text = CoreText(
        components={"text_encoder": ("Qwen3VLModel", "Qwen3VLForConditionalGeneration")}, clip_type="MINIMAX"
    )
    vaes = ("AutoencoderKLMiniMaxH3",)
    latents: ClassVar[tuple[str, ...]] = ("hidden_states", "audio_hidden_states")
    latents_maker = "EmptyMiniMaxH3LatentAV"
    masks_in_loop: ClassVar[bool] = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Bridge:
        """See ``Bridge``.

        Raises:
            InvalidRequest: this version of ComfyUI does not have the family.
        """
        if not hasattr(comfy.supported_models, "MiniMaxH3"):
            raise InvalidRequest(
                f"{checkpoint.name}: this version of ComfyUI has no MiniMax-H3; ComfyUI 0.33.0 and newer have it"
            )
        bridge = cls(checkpoint)
        if bridge.config.get("_sparse"):
            announce_dense(checkpoint.name)
        return bridge

    @property
    def native_class(self) -> type[Any]:  # type: ignore[override]
        """See ``Bridge``."""
        native_class: type[Any] = _core().MiniMaxH3Model
        return native_class

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config, names = self.config, _NAMES
        grid = config.get("adaln_curve_grid")
        names = names | (_PRUNED if grid is not None else _WHOLE)
        inferred = {"image_model": "minimax_h3"} | {theirs: config[ours] for theirs, ours in names.items()}
        epsilons = {name: config.get(name, 1e-5) for name in ("norm_eps", "qk_norm_eps", "final_norm_eps")}
        shifts = {name: config[f"_{name}"] for name in SHIFTS if f"_{name}" in config}
        return inferred | non_default(self.native_class, epsilons | shifts)

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``. The layers that refine text are on the ranks, so ComfyUI passes text on as it is."""
        return {"patch_size": tuple(self.config["patch_size"]), "preprocess_text_embeds": _unchanged}

    def inputs(self, x: Sequence[Tensor], timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        video, sound = x
        if len(video) != 1:
            raise InvalidRequest(
                f"the latent holds {len(video)} videos, and MiniMax-H3 makes one at a time, in ComfyUI, too: sample "
                "them one after another"
            )
        text, payload = pop_text(call_args), call_args.pop("minimax_payload", {})
        layout = self._layout(text, video, sound, payload)
        inputs = {
            "hidden_states": video,
            "audio_hidden_states": sound,
            "timestep": timestep,
            "encoder_hidden_states": text,
        }
        inputs |= _positions(layout) | self._given_rows(layout, payload, video.device)
        inputs |= _text_labels(payload, text.shape[1])
        return inputs | self._masks(layout, call_args)

    def option_inputs(self, transformer_options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        own = dict(zip(SHIFTS, (12.0, 3.0), strict=True)) | {
            name: self.config[f"_{name}"] for name in SHIFTS if f"_{name}" in self.config
        }
        shifts = [float(transformer_options.get(f"minimax_h3_{name}", own[name])) for name in SHIFTS]
        return {"sigma_shifts": torch.tensor([shifts])}

    def loop_inputs(self, model: Any) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's sampler carries the sound on the video's schedule."""
        scale = float(model.audio_scale())
        return {} if scale == 1.0 else {"sound_scale": torch.tensor([scale])}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], temporal=4, spatial=16)

    def _layout(self, text: Tensor, video: Tensor, sound: Tensor, payload: Mapping[str, Any]) -> Any:
        """Return ComfyUI's layout of the rows, which it makes once for a sampling."""
        _, height, width = self.config["patch_size"]
        frames, rows, columns = video.shape[2:]
        sizes = (frames, -(-rows // height) * height, -(-columns // width) * width, sound.shape[-1])
        signature, layout = (text.shape[1], *sizes), payload.get("layout")
        if layout is not None and layout.signature == signature:
            return layout
        return _core().PackedLayout(*signature, keyframes=payload.get("keyframes"), refs=payload.get("refs"))

    def _given_rows(self, layout: Any, payload: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return the rows of keyframes and references, with the noise that ComfyUI adds to them, and their times."""
        native, stub = self.native_class, SimpleNamespace(patch_size=tuple(self.config["patch_size"]))
        found: dict[str, Tensor] = {}
        for name, kinds, rows in (
            ("video_rows", PICTURES, native._cond_video_rows(stub, payload, device)),
            ("sound_rows", SOUNDS, native._cond_audio_rows(stub, payload, device)),
        ):
            ids, count = _ids(layout, kinds), 0 if rows is None else len(rows)
            if len(ids) != count:
                raise InvalidRequest(
                    f"the keyframes and references have {count} {name.replace('_', ' ')}, and {len(ids)} would fit "
                    "their sizes: encode them at the size of the video, with the node that makes its conditioning"
                )
            if rows is not None:
                found |= {name: rows[None], f"{name}_ids": ids[None]}
        if not found:
            return {}
        core = _core()
        times = (
            payload.get("visual_cond_noise_aug", core.VISUAL_COND_TIMESTEP),
            payload.get("audio_cond_noise_aug", core.AUDIO_COND_TIMESTEP),
        )
        return found | {"conditioning_times": torch.tensor([times], dtype=torch.float32)}

    def _masks(self, layout: Any, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """Return how much of the noise each row has, where a noise mask keeps some."""
        video, sound = call_args.pop("denoise_mask", None), call_args.pop("audio_denoise_mask", None)
        found: dict[str, Tensor] = {}
        if video is not None:
            _, frames, rows, columns, _ = layout.signature
            values = _core().mask_row_values(video[0, 0].float(), frames, rows, columns)
            found |= {} if values is None else _levels("mask", values)
        if sound is not None:
            values = sound[0, 0].float().reshape(-1)
            found |= _levels("sound_mask", values) if bool((values < 1.0 - _WHOLE_NOISE).any()) else {}
        return found


_NAMES = {
    "num_layers": "num_layers", "token_refiner_num_layers": "num_refiner_layers", "hidden_size": "hidden_size",
    "latents_dim": "in_channels", "audio_latents_dim": "audio_in_channels", "text_dim": "text_dim",
    "attention_head_dim": "attention_head_dim", "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "ffn_dim", "time_embed_dim": "time_embed_dim", "rope_inv_freq_len": "rope_freq_dim",
}  # fmt: skip
"""What ComfyUI's model detection finds in every file, by its names."""
_PRUNED = {"adaln_curve_grid": "adaln_curve_grid"}
_WHOLE = {"timestep_input_dim": "freq_dim", "time_embed_hidden_size": "time_embed_hidden_dim"}

_WHOLE_NOISE = 1e-3
"""A mask nearer to 1 than this is 1 to ComfyUI's class."""


def _core() -> Any:
    """Return ComfyUI's module. Older versions lack it."""
    import comfy.ldm.minimax.model as core  # type: ignore[import-not-found, unused-ignore]

    return core


def _unchanged(text: Tensor) -> Tensor:
    return text


def _ids(layout: Any, kinds: frozenset[str]) -> Tensor:
    """Return the positions of a layout's rows of these kinds, ``[rows, 3]``, in its order."""
    parts = [layout.position_ids[start:stop] for start, stop, kind in layout.segments if kind in kinds]
    return torch.cat([layout.position_ids[:0], *parts]).float()


def _positions(layout: Any) -> dict[str, Tensor]:
    return {
        "video_ids": _ids(layout, frozenset({"video"}))[None],
        "sound_ids": _ids(layout, frozenset({"audio"}))[None],
    }


def _text_labels(payload: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Return what each token of the text stands for, which the text encoder says."""
    tags = payload.get("text_token_tags")
    if tags is None:
        return {}
    if tags.numel() != length:
        raise InvalidRequest(
            f"the conditioning has {length} tokens of text and says of {tags.numel()} what they are: encode the prompt "
            "anew, and do not combine conditionings"
        )
    return {"text_labels": tags.reshape(1, -1).long()}


def _levels(name: str, values: Tensor) -> dict[str, Tensor]:
    levels, labels = values.unique(return_inverse=True)
    return {f"{name}_levels": levels[None], f"{name}_labels": labels[None]}
