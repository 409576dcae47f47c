"""Open-Sora 2.0 in one process of ComfyUI, with the weights of a small file in the authors' names."""

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy.ldm.common_dit
import comfy.model_patcher
import torch
from any_folder_name.nodes.bridges.custom_model import TransformerSignature
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.families.modules import module_class_of
from any_folder_name.parallel_backend.families.open_sora2.files import ARCHITECTURE
from any_folder_name.parallel_backend.families.open_sora2.transformer import OpenSora2
from natives.case import random_weight, seeded
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_SUPPORT = runpy.run_path(str(Path(__file__).parents[2] / "support" / "open_sora2.py"))
"""``tests/support``, a package that ComfyUI's own ``tests`` hides."""

authors_weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = _SUPPORT["authors_weights"]

CONFIG = {
    "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 128,
    "joint_attention_dim": 32, "pooled_projection_dim": 24,
}  # fmt: skip
FILE = "Open_Sora_v2.safetensors"


def write(folder: Path) -> Path:
    """Write a small random model into a folder, under the published file's name, and return the file."""
    module, random = module_class_of(ARCHITECTURE.class_name)(**CONFIG), seeded(0)
    weights = {name: random_weight(name, value, random) for name, value in module.state_dict().items()}
    tensors = {name: tensor.clone().contiguous() for name, tensor in authors_weights(weights).items()}
    save_file(tensors, folder / FILE)
    return folder / FILE


class Authors(TransformerSignature, nn.Module):
    """ComfyUI's transformer, if it had one: layers in the authors' names, which ComfyUI's nodes can patch.

    Attributes:
        inputs: what each call got, by the family's names.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.dtype = torch.float32
        for name, tensor in weights.items():
            *layers, kind = name.split(".")
            layer: nn.Module = self
            for each in layers[:-1]:
                if each not in layer._modules:
                    layer.add_module(each, nn.Module())
                layer = layer._modules[each]  # type: ignore[assignment]
            if layers[-1] not in layer._modules:
                linear = tensor.ndim == 2 or f"{'.'.join(layers)}.weight" in weights
                layer.add_module(layers[-1], nn.Linear(1, 1) if linear else nn.Module())
            layer._modules[layers[-1]].register_parameter(kind, nn.Parameter(tensor, requires_grad=False))  # type: ignore[union-attr]
        self._family = [OpenSora2(module_class_of(ARCHITECTURE.class_name)(**CONFIG).eval().requires_grad_(False))]
        self.inputs: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def _forward(
        self, x: Tensor, timestep: Tensor, context: Any = None, control: Any = None, options: Any = None, **rest: Any
    ) -> Tensor:
        family = self._family[0]
        family.module.load_state_dict(ARCHITECTURE.to_diffusers(dict(self.state_dict())))
        inputs = {
            "hidden_states": x[:, :16], "timestep": timestep, "encoder_hidden_states": context,
            "pooled_projections": rest["y"],
        }  # fmt: skip
        if x.shape[1] > 16:
            inputs["concat"] = x[:, 16:]
        self.inputs.append(inputs)
        return family.stock(inputs)


def without_backend(file: Path, weights: Mapping[str, Tensor] | None = None) -> comfy.model_patcher.ModelPatcher:
    """Return our custom model class in ComfyUI, with all layers in this process, and with other weights if given."""
    model = bridge_for(open_checkpoint(file)).core_config().get_model({})
    model.diffusion_model = Authors(weights or load_file(file))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
