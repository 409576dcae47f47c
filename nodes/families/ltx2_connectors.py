"""LTX-2's text connectors: layers of the transformer's file that ComfyUI runs on a prompt before it samples.

They are few (two to eight layers for each of picture and sound), and diffusers' transformer lacks them. So ComfyUI's
own class runs them here, once for each prompt of a sampling, as ComfyUI does, with what LoRAs change in them. The text
encoder of ComfyUI 0.8 has them instead, and asks for nothing here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.stored_tensor import StoredTensor
from ...parallel_backend.checkpoint.weight_headers import read_files, weights_under
from ...parallel_backend.errors import InvalidRequest
from ..bridges.bridge import LayersHere, meta_module
from ..remote.digests import described
from ..remote.stored_values import stored_values
from ..remote.weight_fit import changed_weight

CONNECTORS = ("video_embeddings_connector", "audio_embeddings_connector")
PROJECTIONS = ("caption_projection", "audio_caption_projection")
"""Before the connectors in some models; in LTX-2 they follow, and the ranks run them."""

_UNKNOWN = ["unknown"]
"""Stands for the changes of a weight while it is changed."""


class TextConnectors(LayersHere):
    """ComfyUI's ``preprocess_text_embeds`` with the file's weights, which are read when they are first needed.

    Args:
        native_class: ComfyUI's class of the transformer.
        checkpoint: the model.
        unet_config: the class's numbers.
    """

    def __init__(self, native_class: type[Any], checkpoint: Checkpoint, unet_config: dict[str, Any]) -> None:
        self.native_class, self.checkpoint, self.unet_config = native_class, checkpoint, unet_config
        self._module: Any = None
        self._changed: Callable[[], Mapping[str, Sequence[Any]]] = dict
        self._decoded: Callable[[Sequence[str]], Mapping[str, Tensor]] = lambda names: {}
        self._applied: dict[str, list[str]] = {}

    def attach(
        self,
        changed: Callable[[], Mapping[str, Sequence[Any]]],
        decoded: Callable[[Sequence[str]], Mapping[str, Tensor]],
    ) -> None:
        """See ``LayersHere``."""
        self._changed, self._decoded = changed, decoded

    @torch.no_grad()
    def __call__(self, context: Tensor, unprocessed: bool = False) -> Tensor:
        """Return the text of picture and sound ``[B, L, D]``. What is processed already is returned as it is.

        Raises:
            InvalidRequest: the model's files have no connectors, or others than their metadata says.
        """
        module = self._module or _on_meta(self.native_class, self.unet_config)
        done = (module.cross_attention_dim + module.audio_cross_attention_dim, 2 * module.caption_channels)
        if not unprocessed and context.shape[-1] in done:
            return context
        if self._module is None:
            self._read(module, list(_parameters(module)))
            self._module = module
        self._apply(module, self._changed())
        processed: Tensor = self.native_class.preprocess_text_embeds(module, context, unprocessed=unprocessed)
        return processed

    def _apply(self, module: Any, changes: Mapping[str, Sequence[Any]]) -> None:
        """Change weights as nodes say, beginning with those of the file."""
        wanted = {name: [described(part) for part in parts] for name, parts in changes.items()}
        stale = {name for name in self._applied.keys() | wanted.keys() if self._applied.get(name) != wanted.get(name)}
        known = stale & set(_parameters(module))  # others are of layers that the ranks run
        self._applied |= dict.fromkeys(known, _UNKNOWN)  # until all are changed: what follows may fail
        self._read(module, sorted(known))
        for name in known & changes.keys():
            weight = module.get_parameter(name)
            _set(
                module, name, changed_weight(name, weight.to(torch.float32, copy=True), changes[name]).to(weight.dtype)
            )
        self._applied = wanted

    def _read(self, module: Any, names: Sequence[str]) -> None:
        """Give parameters the file's weights."""
        stored = self.checkpoint.stored("transformer")
        found = weights_under(stored.prefix, read_files(stored.files))
        tensors = {name: self._stored(found.get(name), name) for name in names}
        compressed = [name for name, tensor in tensors.items() if tensor.compression is not None]
        decoded = self._decoded(compressed) if compressed else {}
        for name, tensor in tensors.items():
            weight, shape = (
                decoded[name] if name in decoded else stored_values(tensor),
                module.get_parameter(name).shape,
            )
            if weight.shape != shape:
                raise InvalidRequest(
                    f"{self.checkpoint.name}: {name} has shape {list(weight.shape)}, and the metadata of the file "
                    f"describes {list(shape)}: download it again"
                )
            _set(module, name, weight)

    def _stored(self, stored: StoredTensor | None, name: str) -> StoredTensor:
        if stored is None:
            raise InvalidRequest(
                f"{self.checkpoint.name} lacks the text connectors of LTX-2 ({name}), through which a prompt has to "
                "go: choose a file that has them, as the published ones do"
            )
        return stored


def _on_meta(native_class: type[Any], unet_config: dict[str, Any]) -> Any:
    """Return ComfyUI's module without its blocks, on the meta device. Its layers compute in their input's dtype."""
    module: Any = meta_module(native_class, {**unet_config, "num_layers": 0})
    for layer in module.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
    return module


def _parameters(module: Any) -> Iterator[str]:
    """Yield the names of the connectors' parameters."""
    for layer in (*CONNECTORS, *(PROJECTIONS if module.caption_proj_before_connector else ())):
        found = getattr(module, layer)
        if isinstance(found, nn.Module):  # else a function that returns its argument
            yield from (f"{layer}.{name}" for name, _ in found.named_parameters())


def _set(module: Any, name: str, weight: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
