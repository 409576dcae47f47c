"""Open-Sora 2.0 against tensors of the authors' ``MMDiTModel`` and sampler."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.open_sora2.files import ARCHITECTURE
from parallel_backend.families.open_sora2.transformer import OpenSora2
from parallel_backend.families.shared.patchify import to_tokens
from parallel_backend.interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP
from parallel_backend.interfaces.state import State

from .difference import FORWARD, Difference, of_tensors
from .part import Part, load_weights

_ONLY = {"patch_size": 2, "mlp_ratio": 4.0, "qkv_bias": True, "cond_embed": True, "use_liger_rope": True}
"""Settings of the authors' class that all published models for HunyuanVideo's VAE share."""

_MODULES = {
    "img_in": "x_embedder.latent", "cond_in": "x_embedder.condition", "txt_in": "context_embedder",
    "time_in": "time_text_embed.timestep_embedder", "vector_in": "time_text_embed.text_embedder",
}  # fmt: skip
"""Our modules by the authors' names."""


def model(part: Part) -> OpenSora2:
    """Return the part's model.

    Raises:
        InvalidRequest: its config is of another kind, or its weights do not fit.
    """
    config = part.entry("config")
    for name, value in _ONLY.items():
        if config.get(name, value) != value:
            raise InvalidRequest(f"{part.file}: {name} {config[name]!r} is not supported; {value!r} is")
    module = module_class_of(ARCHITECTURE.class_name)(**_config(config))
    load_weights(module, ARCHITECTURE.to_diffusers(part.load(part.entry("weights"))))
    return OpenSora2(module.eval().requires_grad_(False))


def _config(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "in_channels": theirs["in_channels"],
        "num_layers": theirs["depth"],
        "num_single_layers": theirs["depth_single_blocks"],
        "attention_head_dim": theirs["hidden_size"] // theirs["num_heads"],
        "num_attention_heads": theirs["num_heads"],
        "joint_attention_dim": theirs["context_in_dim"],
        "pooled_projection_dim": theirs["vec_in_dim"],
        "guidance_embeds": theirs["guidance_embed"],
        "axes_dims_rope": tuple(theirs["axes_dim"]),
        "rope_theta": theirs["theta"],
    }


def forward(part: Part) -> Iterator[Difference]:
    """Compare single forwards, and what passes through on the way where the reference has it."""
    family = model(part)
    for cell in part.cells("in.latent"):
        inputs = part.under(cell, "in")
        got, middle = _run(family, _inputs(inputs))
        for name, wanted in part.under(cell, "mid").items():
            yield of_tensors(f"{part.name} {cell} {name}", _like(middle, name, wanted), wanted, FORWARD)
        packed = to_tokens(got, family.geometry.patch, "c pt ph pw")
        yield of_tensors(f"{part.name} {cell}", packed, part.tensor(f"{cell}.out"), FORWARD)


def _inputs(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        LATENT: theirs["latent"],
        TIMESTEP: theirs["timesteps"] * 1000,
        "encoder_hidden_states": theirs["txt"],
        "pooled_projections": theirs["y_vec"],
        "concat": torch.cat([theirs["mask"], theirs["reference"]], dim=1),
    }


def _run(family: OpenSora2, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a forward's prediction, and what passed through by the authors' names."""
    middle: dict[str, Tensor] = {}
    hooks = [
        family.module.get_submodule(ours).register_forward_hook(
            lambda _, __, result, name=theirs: middle.__setitem__(name, result)
        )
        for theirs, ours in _MODULES.items()
    ]
    try:
        state = family.embed(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name in ("cos", "sin"):
        middle[f"pe.{name}"] = torch.cat([state.tables[stream][name] for stream in (TEXT, IMAGE)], dim=1)
    double = len(family.module.transformer_blocks)
    for i, block in enumerate(family.blocks):
        state = block.run(state)
        middle |= _after_block(state, f"double_blocks.{i}" if i < double else f"single_blocks.{i - double}", i < double)
    return family.unpatchify(family.head(state), inputs[LATENT].shape[2:]), middle


def _after_block(state: State, name: str, double: bool) -> dict[str, Tensor]:
    text, image = state.streams[TEXT], state.streams[IMAGE]
    return {f"{name}.img": image, f"{name}.txt": text} if double else {name: torch.cat([text, image], dim=1)}


def _like(middle: Mapping[str, Tensor], name: str, wanted: Tensor) -> Tensor:
    """Return what we have of a name, for each sample where one table stands for all.

    Raises:
        InvalidRequest: nothing of ours has the name.
    """
    if name not in middle:
        raise InvalidRequest(f"nothing of ours is called mid.{name}; known: {', '.join(middle)}")
    got = middle[name]
    return got.expand(len(wanted), *got.shape[1:]) if len(got) == 1 else got


def refusal(part: Part) -> Iterator[Difference]:
    """Check that the file of weights, which are for another VAE, is refused in one sentence."""
    try:
        open_checkpoint(part.file.parent / part.entry("weights"))
    except InvalidRequest as error:
        yield Difference(cell=f"{part.name} refused", note=str(error))
    else:
        yield Difference(cell=f"{part.name} refused", error=1.0, note="the file is taken for a model that is supported")
