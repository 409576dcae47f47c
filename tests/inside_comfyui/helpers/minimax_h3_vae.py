"""A narrow video VAE of MiniMax-H3, which ComfyUI builds at its published size whatever a file holds."""

from typing import Any

import pytest
from helpers import dynamic_vram
from helpers.native_vaes import Weights, randomize

try:
    from comfy.ldm.minimax import vae as core
except ImportError:  # older versions of ComfyUI
    core = None


def other_defaults(monkeypatch: pytest.MonkeyPatch, function: Any, **values: Any) -> None:
    """Set other defaults of a function's arguments."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(function.__defaults__) :]
    defaults = dict(zip(names, function.__defaults__, strict=True)) | values
    monkeypatch.setattr(function, "__defaults__", tuple(defaults.values()))


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI, if it has the VAE, build a narrow one with few layers; its tiles stay as large as they are."""
    if core is None:
        return
    sizes = {"ch": 32, "ch_mult": (1, 2, 1, 1, 1, 2), "num_res_blocks": 1}
    other_defaults(monkeypatch, core.ViT3DDecoder.__init__, num_layers=2, heads=2)
    other_defaults(monkeypatch, core.MiniMaxH3VideoVAE.__init__, **sizes)


@dynamic_vram.off()
def weights() -> Weights:
    """Return random weights by the published names."""
    found: Weights = randomize(core.MiniMaxH3VideoVAE()).state_dict()
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}
