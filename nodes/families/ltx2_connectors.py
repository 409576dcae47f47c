"""LTX-2's text connectors: layers of the transformer's file that ComfyUI runs on a prompt before it samples.

They are few (two to eight layers for each of picture and sound), and diffusers' transformer lacks them. So ComfyUI's
own class runs them here, once for each prompt of a sampling, as ComfyUI does. The text encoder of ComfyUI 0.8 has them
instead, and asks for nothing here.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.dtypes import TORCH_DTYPES
from ...parallel_backend.checkpoint.stored_tensor import StoredTensor
from ...parallel_backend.checkpoint.weight_headers import read_files
from ...parallel_backend.errors import InvalidRequest
from ..bridges.bridge import meta_module

CONNECTORS = ("video_embeddings_connector", "audio_embeddings_connector")
_PROJECTIONS = ("caption_projection", "audio_caption_projection")
"""Before the connectors in some models; in LTX-2 they follow, and the ranks run them."""


class TextConnectors:
    """ComfyUI's ``preprocess_text_embeds`` with the file's weights, which are read when they are first needed.

    Args:
        native_class: ComfyUI's class of the transformer.
        checkpoint: the model.
        unet_config: the class's numbers.
    """

    def __init__(self, native_class: type[Any], checkpoint: Checkpoint, unet_config: dict[str, Any]) -> None:
        self.native_class, self.checkpoint, self.unet_config = native_class, checkpoint, unet_config
        self._module: Any = None

    @torch.no_grad()
    def __call__(self, context: Tensor, unprocessed: bool = False) -> Tensor:
        """Return the text of picture and sound ``[B, L, D]``. What is processed already is returned as it is.

        Raises:
            InvalidRequest: the model's files have no connectors, or compressed ones.
        """
        module = self._module or _on_meta(self.native_class, self.unet_config)
        done = (module.cross_attention_dim + module.audio_cross_attention_dim, 2 * module.caption_channels)
        if not unprocessed and context.shape[-1] in done:
            return context
        if self._module is None:
            _read(module, self.checkpoint)
            self._module = module
        processed: Tensor = self.native_class.preprocess_text_embeds(module, context, unprocessed=unprocessed)
        return processed


def _on_meta(native_class: type[Any], unet_config: dict[str, Any]) -> Any:
    """Return ComfyUI's module without its blocks, on the meta device. Its layers compute in their input's dtype."""
    module: Any = meta_module(native_class, {**unet_config, "num_layers": 0})
    for layer in module.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
    return module


def _read(module: Any, checkpoint: Checkpoint) -> None:
    """Give the connectors their weights."""
    stored = checkpoint.stored("transformer")
    found = read_files(stored.files).tensors
    for layer in (*CONNECTORS, *(_PROJECTIONS if module.caption_proj_before_connector else ())):
        connector = getattr(module, layer)
        if not isinstance(connector, nn.Module):
            continue  # a function that returns its argument
        for name, parameter in list(connector.named_parameters()):
            tensor = _value(found.get(f"{stored.prefix}{layer}.{name}"), f"{layer}.{name}", checkpoint)
            if tensor.shape != parameter.shape:
                raise InvalidRequest(
                    f"{checkpoint.name}: {layer}.{name} has shape {list(tensor.shape)}, and the metadata of the file "
                    f"describes {list(parameter.shape)}: download it again"
                )
            owner, _, leaf = name.rpartition(".")
            setattr(connector.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _value(stored: StoredTensor | None, name: str, checkpoint: Checkpoint) -> Tensor:
    if stored is None:
        raise InvalidRequest(
            f"{checkpoint.name} lacks the text connectors of LTX-2 ({name}), through which a prompt has to go: choose "
            "a file that has them, as the published ones do"
        )
    if stored.dtype not in TORCH_DTYPES:
        raise InvalidRequest(
            f"{checkpoint.name}: the text connectors are compressed ({name} is {stored.dtype}), which is not "
            "supported: choose a file whose connectors are not"
        )
    data = np.fromfile(stored.file, np.uint8, count=stored.bytes, offset=stored.offset)
    return torch.from_numpy(data).view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)
