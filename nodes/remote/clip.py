"""The loader's CLIP: a text encoder on the ranks, or ComfyUI's own, read from the same folder."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch

from ...parallel_backend.checkpoint.checkpoint import Checkpoint, StoredComponent
from ...parallel_backend.checkpoint.single_file import SingleFile
from ...parallel_backend.errors import InvalidRequest
from ..backend.connection import Handle
from ..bridges.bridge import BackendText, CoreText
from .mistral_tokenizer import tekken_json
from .patcher import RemotePatcher
from .preflight import CLIP_OUTPUT, check_output
from .text_encoder import backend_clip
from .unread_clip import LazyCoreClip

_PREFIXES = {
    # A vision-language model, as transformers 5 and transformers 4 save it.
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "language_model.model.": "model.",
    # A language model without its language-model head.
    "embed_tokens.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    # CLIP as transformers 5 saves it.
    "embeddings.": "text_model.embeddings.",
    "encoder.layers.": "text_model.encoder.layers.",
    "final_layer_norm.": "text_model.final_layer_norm.",
}
"""ComfyUI's prefixes of weight names by transformers' prefixes."""

_QWEN3_VL = "visual.deepstack_merger_list."
"""The beginning of a name that only Qwen3-VL has. ComfyUI takes it with the prefixes of transformers 5 alone."""

_QWEN3_VL_WIDTH = "visual.merger.linear_fc2.weight"
"""The end of the name of a weight that has as many rows as Qwen3-VL is wide."""
_H3_WIDTH, _H3_LAYERS = 5120, 50
"""MiniMax-H3 takes what the 50th layer of Qwen3-VL-32B gives, and ComfyUI's class has no more layers."""

_H3_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model.", "language_model.": "model."}
"""ComfyUI's prefixes of its weights, by transformers' with and without the language-model head."""

_QWEN3_VL_PREFIXES = {"visual.": "model.visual.", "language_model.": "model.language_model."}
"""These prefixes by those of the model without its language-model head."""


def checkpoint_clip(handle: Handle, text: BackendText | CoreText, model: RemotePatcher) -> comfy.sd.CLIP:
    """Return the CLIP of a checkpoint."""
    if isinstance(handle.checkpoint, SingleFile):
        return LazyCoreClip(partial(_checked, handle.checkpoint, partial(_from_file, handle.checkpoint)))
    if isinstance(text, BackendText):
        return backend_clip(handle, text, model)
    return core_clip(handle.checkpoint, text)


def core_clip(checkpoint: Checkpoint, text: CoreText) -> LazyCoreClip:
    """Return ComfyUI's own CLIP for the text encoders of a folder."""
    return LazyCoreClip(partial(_checked, checkpoint, partial(_from_folder, checkpoint, text)))


def _checked(checkpoint: Checkpoint, read: Callable[[], comfy.sd.CLIP]) -> comfy.sd.CLIP:
    check_output(checkpoint, CLIP_OUTPUT)
    return read()


def _from_folder(checkpoint: Checkpoint, text: CoreText) -> comfy.sd.CLIP:
    present = [component for component in text.components if component in checkpoint.components]
    stored = {component: checkpoint.stored(component) for component in present}  # refuses before any is read
    return comfy.sd.load_text_encoder_state_dicts(
        [_state_dict(checkpoint, component, each) for component, each in stored.items()],
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=comfy.sd.CLIPType[text.clip_type],
    )


def _from_file(checkpoint: Checkpoint) -> comfy.sd.CLIP:
    """Load the text encoders of a file that holds a whole model, and nothing else of it.

    Raises:
        InvalidRequest: ComfyUI finds none in it.
    """
    try:
        found = comfy.sd.load_checkpoint_guess_config(
            str(checkpoint.path),
            output_vae=False,
            output_model=False,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )[1]
    except RuntimeError as error:
        if "detect model type" not in str(error):
            raise
        raise _no_text_encoder(checkpoint) from error
    if found is None:
        raise _no_text_encoder(checkpoint)
    return found


def _no_text_encoder(checkpoint: Checkpoint) -> InvalidRequest:
    return InvalidRequest(
        f"ComfyUI finds no text encoder of this model in {checkpoint.name}: load one with ComfyUI's Load CLIP node"
    )


def _state_dict(checkpoint: Checkpoint, component: str, stored: StoredComponent) -> dict[str, Any]:
    state_dict: dict[str, Any] = {}
    for file in stored.files:
        state_dict |= comfy.utils.load_torch_file(str(file), safe_load=True)
    if checkpoint.components[component].startswith("Mistral"):
        # ComfyUI's own files hold the tokenizer under this name.
        data = bytearray(tekken_json(checkpoint.path / "tokenizer" / "tokenizer.json"))
        state_dict["tekken_model"] = torch.frombuffer(data, dtype=torch.uint8)
    return with_comfyui_names(state_dict)


def with_comfyui_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a text encoder's weights under the names that ComfyUI expects."""
    if any(name.removeprefix("model.").startswith(_QWEN3_VL) for name in state_dict):
        if any(name.endswith(_QWEN3_VL_WIDTH) and len(each) == _H3_WIDTH for name, each in state_dict.items()):
            return _of_minimax_h3(state_dict)
        return dict(comfy.utils.state_dict_prefix_replace(state_dict, dict(_QWEN3_VL_PREFIXES)))
    return dict(comfy.utils.state_dict_prefix_replace(state_dict, dict(_PREFIXES)))


def _of_minimax_h3(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the layers of Qwen3-VL-32B that MiniMax-H3 takes, under the names that ComfyUI's own file has."""
    named = comfy.utils.state_dict_prefix_replace(state_dict, dict(_H3_PREFIXES))
    return {name: tensor for name, tensor in named.items() if not _is_left_out(name)}


def _is_left_out(name: str) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name in ("model.norm.weight", "lm_head.weight") or (layer is not None and int(layer[1]) >= _H3_LAYERS)
