"""Converters of VAEs from original names. Layers have other names only, but for Mochi's fused attention.

diffusers has converters for some of these VAEs, but they tell versions apart by published widths and depths. Tests
compare these with them.
"""

from collections.abc import Callable

from torch import Tensor

from ..checkpoint.architectures import VAES, architecture_of

Tensors = dict[str, Tensor]


def _by_name(class_name: str) -> Callable[[Tensors], Tensors]:
    def convert(tensors: Tensors) -> Tensors:
        in_diffusers = architecture_of(class_name).in_diffusers
        assert in_diffusers is not None
        return {new: tensors[name] for name, new in in_diffusers(tensors).items()}

    return convert


def _mochi(tensors: Tensors) -> Tensors:
    converted: Tensors = {}
    for name, tensor in _by_name("AutoencoderKLMochi")(tensors).items():
        if ".to_qkv." in name:
            parts = zip(("to_q", "to_k", "to_v"), tensor.chunk(3), strict=True)
            converted |= {name.replace("to_qkv", layer): part for layer, part in parts}
        else:
            converted[name] = tensor
    return converted


VAE_CONVERTERS: dict[str, Callable[[Tensors], Tensors]] = {
    architecture.class_name: _by_name(architecture.class_name) for architecture in VAES if architecture.in_diffusers
} | {"AutoencoderKLMochi": _mochi}
"""Converters by diffusers' class."""
