"""Layers in original files that diffusers splits."""

from ..architecture import Converter, Tensors, single_file


def of_any_width(name: str) -> Converter:
    """Return diffusers' converter of this name, which assumes Flux.1's width, for models of any width."""
    published = single_file(name)

    def convert(tensors: Tensors) -> Tensors:
        others = {
            name: tensor.new_zeros(7 * 3072) if ".linear1." in name else tensor for name, tensor in tensors.items()
        }
        return published(others) | split_linear1(tensors, len(tensors["img_in.weight"]))

    return convert


def split_linear1(tensors: Tensors, width: int) -> Tensors:
    """Return the four layers into which diffusers splits the first layer of each single block."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        if ".linear1." in name:
            parts = tensor.split([width, width, width, len(tensor) - 3 * width])
            renamed = name.replace("single_blocks", "single_transformer_blocks")
            layers = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            split |= {renamed.replace("linear1", layer): part for layer, part in zip(layers, parts, strict=True)}
    return split
