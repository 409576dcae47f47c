"""The loader's CLIP: run by the ranks, or ComfyUI's own, read from the same folder."""

from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.weight_files import weight_files
from ..backend.connection import Handle
from ..bridges.bridge import BackendText, CoreText
from .mistral_tokenizer import tekken
from .patcher import RemotePatcher
from .preflight import check_part
from .text_encoder import backend_clip

_PREFIXES = {
    # A model that also sees pictures, as it is saved today and as it was.
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "language_model.model.": "model.",
    # A language model without the head that predicts the next token.
    "embed_tokens.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    # CLIP as transformers 5 saves it.
    "embeddings.": "text_model.embeddings.",
    "encoder.layers.": "text_model.encoder.layers.",
    "final_layer_norm.": "text_model.final_layer_norm.",
}
"""ComfyUI's prefix of weights' names by transformers'."""


def clip(handle: Handle, text: BackendText | CoreText, model: RemotePatcher) -> comfy.sd.CLIP:
    """The text encoders of a checkpoint. ``model`` is the patcher of its MODEL."""
    if isinstance(text, BackendText):
        return backend_clip(handle, text, model)
    return CoreClip(handle.checkpoint, text)


class CoreClip(comfy.sd.CLIP):  # type: ignore[misc]
    """ComfyUI's CLIP, whose weights are read when something of it is first asked for."""

    def __init__(self, checkpoint: Checkpoint, text: CoreText) -> None:
        super().__init__(no_init=True)
        self._checkpoint, self._text = checkpoint, text

    def __getattr__(self, name: str) -> Any:
        if "tokenizer" in self.__dict__ or name.startswith("__"):
            raise AttributeError(name)
        self.__dict__.update(self._read().__dict__)
        return getattr(self, name)

    def _read(self) -> comfy.sd.CLIP:
        check_part(self._checkpoint, 1)
        present = [component for component in self._text.components if component in self._checkpoint.components]
        states = [_state(self._checkpoint, component) for component in present]
        return comfy.sd.load_text_encoder_state_dicts(
            states,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType[self._text.clip_type],
        )


def _state(checkpoint: Checkpoint, component: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for file in weight_files(checkpoint, component):
        state |= comfy.utils.load_torch_file(str(file), safe_load=True)
    if checkpoint.components[component].startswith("Mistral"):
        # Where ComfyUI's own files have it.
        data = bytearray(tekken(checkpoint.path / "tokenizer" / "tokenizer.json"))
        state["tekken_model"] = torch.frombuffer(data, dtype=torch.uint8)
    return renamed(state)


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    """A language model's weights under the names that ComfyUI expects."""
    return dict(comfy.utils.state_dict_prefix_replace(state, dict(_PREFIXES)))
