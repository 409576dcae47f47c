"""Tiny models of the families that ComfyUI lacks: diffusers' own forward with the arguments of ComfyUI's calls."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import comfy.ldm.common_dit
import comfy.model_patcher
import diffusers
import torch
from any_folder_name.nodes.bridges.bridge import Bridge
from any_folder_name.nodes.bridges.custom_model import TransformerSignature
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.families.modules import module_class_of
from natives import HAS_COGVIDEOX
from natives.case import Random, random_weight, seeded
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

TEXT = (7, 32)
"""Tokens and width of a prompt."""
Forward = Callable[[Any, Tensor, Tensor, Mapping[str, Any]], Tensor]
"""From diffusers' module, latent, timestep and the call's other arguments to a prediction."""


@dataclass(frozen=True, kw_only=True)
class CustomCase:
    """One variant of a family.

    Attributes:
        transformer: diffusers' class.
        config: the config of diffusers' class.
        scheduler: diffusers' scheduler.
        latent: the latent's shape.
        forward: diffusers' own forward.
        vae: the VAE's class and scaling.
        extra: entries of CONDITIONING besides the text.
        fixed: whether all prompts have the same number of tokens.
    """

    transformer: str
    config: Mapping[str, Any]
    scheduler: Any
    latent: tuple[int, ...]
    forward: Forward
    vae: Mapping[str, Any]
    extra: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    fixed: bool = False

    def module(self) -> Any:
        """Return diffusers' module with random weights that keep every part above rounding errors."""
        random, module = seeded(0), module_class_of(self.transformer)(**self.config)
        module.load_state_dict(
            {name: random_weight(name, value, random) for name, value in module.state_dict().items()}
        )
        return module.eval().requires_grad_(False)

    def write(self, folder: Path) -> None:
        """Save the module as a checkpoint whose VAE has no weights."""
        self.module().save_pretrained(folder / "transformer")
        self.scheduler.save_pretrained(folder / "scheduler")
        (folder / "vae").mkdir()
        (folder / "vae" / "config.json").write_text(json.dumps(self.vae))
        index = {
            "transformer": ["diffusers", self.transformer],
            "scheduler": ["diffusers", type(self.scheduler).__name__],
            "vae": ["diffusers", self.vae["_class_name"]],
        }
        (folder / "model_index.json").write_text(json.dumps(index))

    def samples(self) -> dict[str, Any]:
        """Return LATENT."""
        return {"samples": torch.zeros(self.latent)}

    def conditioning(self, seed: int, shorter: int = 0) -> list[Any]:
        """Return one random conditioning whose text is ``shorter`` tokens shorter."""
        random = seeded(seed)
        tokens, width = TEXT
        return [[random(1, tokens - (0 if self.fixed else shorter), width), self.extra(random)]]


def encoder() -> T5EncoderModel:
    """Return a tiny text encoder with random weights."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=TEXT[1], d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    return T5EncoderModel(config).eval().requires_grad_(False)


class Stock(TransformerSignature, nn.Module):
    """diffusers' module in the place of ComfyUI's transformer. Weights have diffusers' names.

    Attributes:
        latents: the latents that it was called with.
    """

    def __init__(self, case: CustomCase) -> None:
        super().__init__()
        module = case.module()
        self._stock, self.case, self.dtype = [module], case, torch.float32
        self.latents: list[Tensor] = []
        for name, child in module.named_children():
            self.add_module(name, child)

    @torch.no_grad()
    def _forward(
        self, x: Tensor, timestep: Tensor, context: Any = None, control: Any = None, options: Any = None, **rest: Any
    ) -> Tensor:
        """Return the prediction for the latent, padded and cropped as in ComfyUI."""
        self.latents.append(x)
        patch = (1, 2, 2)[-(x.ndim - 2) :]
        padded = comfy.ldm.common_dit.pad_to_patch_size(x, patch)
        out = self.case.forward(self._stock[0], padded, timestep, {"context": context, **rest})
        return out[..., : x.shape[-2], : x.shape[-1]]


def _cogvideox(module: Any, x: Tensor, timestep: Tensor, call_args: Mapping[str, Any]) -> Tensor:
    config, (frames, height, width), rope = module.config, x.shape[2:], None
    if config.use_rotary_positional_embeddings:
        pipeline = diffusers.CogVideoXPipeline(
            tokenizer=None, text_encoder=None, vae=None, transformer=module, scheduler=None
        )
        rope = pipeline._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, x.device)
    ofs = None if config.ofs_embed_dim is None else x.new_full((1,), 2.0)
    out: Tensor = module(
        x.transpose(1, 2), call_args["context"], timestep, ofs=ofs, image_rotary_emb=rope, return_dict=False
    )[0]
    return out.transpose(1, 2)


def _latte(module: Any, x: Tensor, timestep: Tensor, call_args: Mapping[str, Any]) -> Tensor:
    out: Tensor = module(x, timestep, encoder_hidden_states=call_args["context"], return_dict=False)[0]
    return out[:, :4]


def _dit(module: Any, x: Tensor, timestep: Tensor, call_args: Mapping[str, Any]) -> Tensor:
    labels = call_args["class_labels"]
    labels = torch.where(labels < 0, module.config.num_embeds_ada_norm, labels)
    out: Tensor = module(x, timestep, class_labels=labels, return_dict=False)[0]
    return out[:, :4]


def _image(random: Random) -> dict[str, Any]:
    return {"concat_latent_image": random(1, 16, 1, 6, 10)}


SMALL = {
    "num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16, "text_embed_dim": 32, "time_embed_dim": 24,
    "sample_height": 6, "sample_width": 10, "sample_frames": 9, "max_text_seq_length": 7,
}  # fmt: skip
ROTARY = {**SMALL, "use_rotary_positional_embeddings": True}
NEWER = {**ROTARY, "patch_size_t": 2, "patch_bias": False}


def _video(config: Mapping[str, Any], shift: float, latent: tuple[int, ...], **options: Any) -> CustomCase:
    scheduler = diffusers.CogVideoXDDIMScheduler(
        snr_shift_scale=shift, rescale_betas_zero_snr=True, prediction_type="v_prediction", clip_sample=False
    )
    vae = {"_class_name": "AutoencoderKLCogVideoX", "scaling_factor": 1.15258426 if shift == 3.0 else 0.7}
    return CustomCase(
        transformer="CogVideoXTransformer3DModel", config=config, scheduler=scheduler, latent=latent,
        forward=_cogvideox, vae=vae | options.pop("vae", {}), **options,
    )  # fmt: skip


_DDIM = {"clip_sample": False, "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
_SD = {"_class_name": "AutoencoderKL", "scaling_factor": 0.18215}
_NEWER_I2V = {**NEWER, "in_channels": 32, "ofs_embed_dim": 24}

_NEWER_CASES = {
    "cogvideox 1.5": _video(NEWER, 1.0, (2, 16, 4, 5, 9)),
    "cogvideox 1.5 i2v": _video(_NEWER_I2V, 1.0, (2, 16, 4, 6, 10), extra=_image, vae={"invert_scale_latents": True}),
}
"""Variants that newer versions of ComfyUI have."""

CASES: dict[str, CustomCase] = {
    "cogvideox 2b": _video(SMALL, 3.0, (2, 16, 3, 5, 9), fixed=True),
    "cogvideox 5b": _video(ROTARY, 1.0, (2, 16, 3, 5, 9)),
    "cogvideox 5b i2v": _video(
        {**ROTARY, "in_channels": 32, "use_learned_positional_embeddings": True}, 1.0, (2, 16, 3, 6, 10),
        extra=_image, fixed=True,
    ),
    **({} if HAS_COGVIDEOX else _NEWER_CASES),
    "latte": CustomCase(
        transformer="LatteTransformer3DModel", forward=_latte, vae=_SD, latent=(2, 4, 3, 5, 7),
        scheduler=diffusers.DDIMScheduler(**_DDIM),
        config={
            "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "cross_attention_dim": 24, "attention_bias": True, "sample_size": 8, "patch_size": 2,
            "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
            "caption_channels": 32, "video_length": 3,
        },
    ),
    "dit": CustomCase(
        transformer="DiTTransformer2DModel", forward=_dit, vae=_SD, latent=(2, 4, 7, 7),
        scheduler=diffusers.DDIMScheduler(**_DDIM), extra=lambda random: {"class_labels": int(random(1).abs() * 4)},
        config={
            "num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "num_embeds_ada_norm": 10, "out_channels": 8,
        },
    ),
}  # fmt: skip


@cache
def bridge_of(folder: Path) -> Bridge:
    """Return the bridge of a case's checkpoint."""
    return bridge_for(open_checkpoint(folder))


def without_backend(folder: Path) -> comfy.model_patcher.ModelPatcher:
    """Return our custom model class in ComfyUI with diffusers' forward and without a backend."""
    model = bridge_of(folder).core_config().get_model({})
    model.diffusion_model = Stock(CASES[folder.name])
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
