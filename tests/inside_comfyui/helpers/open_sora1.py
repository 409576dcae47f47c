"""Open-Sora 1.2 in one process of ComfyUI, with the weights of a small file in the published names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_patcher
import torch
from any_folder_name.nodes.bridges.custom_model import TransformerSignature
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.families.modules import module_class_of
from any_folder_name.parallel_backend.families.open_sora1.files import CLASS_NAME
from any_folder_name.parallel_backend.vaes import module_class_of as vae_class_of
from natives.case import random_weight, seeded
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONFIG = {"hidden_size": 48, "num_heads": 3, "depth": 2, "caption_channels": 32, "model_max_length": 12}
FILE = "OpenSora-STDiT-v3.safetensors"

VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1, "filters": 32, "num_res_blocks": 1}
VAE_FILE = "OpenSora-VAE-v1.2.safetensors"


def write(folder: Path) -> Path:
    """Write a small random model into a folder, under the published name, and return the file."""
    module, random = module_class_of(CLASS_NAME)(**CONFIG), seeded(0)
    weights = {name: random_weight(name, value, random) for name, value in module.state_dict().items()}
    weights["rope.freqs"] = torch.ones(8)  # constants of the published file, which nothing reads
    save_file(weights, folder / FILE)
    return folder / FILE


def vae_module() -> Any:
    """Return a small random VAE whose pixels vary."""
    module, random = vae_class_of("VideoAutoencoderPipeline")(**VAE), seeded(3)
    kept = {name: value for name, value in module.state_dict().items() if name in ("scale", "shift")}
    made = {name: random_weight(name, value, random) for name, value in module.state_dict().items()}
    module.load_state_dict(made | kept)
    return module.eval().requires_grad_(False)


def write_vae(folder: Path) -> Path:
    """Write the VAE into a folder, under the published name, and return the file."""
    save_file(dict(vae_module().state_dict()), folder / VAE_FILE)
    return folder / VAE_FILE


class Authors(TransformerSignature, nn.Module):
    """ComfyUI's transformer, if it had one: our module's own forward, with layers that ComfyUI's nodes can patch.

    Attributes:
        inputs: what each call got, by the names of ComfyUI's arguments.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        module = module_class_of(CLASS_NAME)(**CONFIG).eval().requires_grad_(False)
        module.load_state_dict({name: value for name, value in weights.items() if name != "rope.freqs"})
        self.dtype, self._module = torch.float32, [module]
        for name, child in module.named_children():
            self.add_module(name, child)
        self.inputs: list[dict[str, Any]] = []

    @torch.no_grad()
    def _forward(
        self, x: Tensor, timestep: Tensor, context: Any = None, control: Any = None, options: Any = None, **rest: Any
    ) -> Tensor:
        self.inputs.append({"x": x, "timestep": timestep, "context": context, **rest})
        batch, frames = len(x), x.shape[2]
        sides = rest.get("resolution", torch.tensor([[8.0 * x.shape[3], 8.0 * x.shape[4]]])).expand(batch, -1)
        rate = rest.get("frame_rate", torch.tensor([120.0 if frames == 1 else 24.0])).expand(batch)
        mask = None
        if "generated" in rest:
            mask = rest["generated"] * 1000 >= timestep.clamp(max=1000.0)[:, None]
        text, valid = context.expand(batch, -1, -1), rest.get("attention_mask")
        out = self._module[0](x, timestep, text, rate, sides[:, 0], sides[:, 1], mask=valid, x_mask=mask)
        return -out[:, :4]


def without_backend(file: Path, weights: Mapping[str, Tensor] | None = None) -> comfy.model_patcher.ModelPatcher:
    """Return our custom model class in ComfyUI, with all layers in this process, and with other weights if given."""
    model = bridge_for(open_checkpoint(file)).core_config().get_model({})
    model.diffusion_model = Authors(weights or load_file(file))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
