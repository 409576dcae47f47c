"""A checkpoint's components, each loaded on first use and then kept."""

from collections.abc import Sequence
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..distributed.mesh import Axis
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..protocol.model_spec import Adapter, Overlay
from ..protocol.status import LoadedModel
from ..protocol.tensors import NAMES
from ..vaes import vae_of
from .load import check_component, load_text_encoder, load_vae, text_encoder_bytes, vae_bytes
from .loaded_transformers import Transformers
from .offload_plan import with_slack
from .parts import DeviceMemory, Parts
from .room import check_fits, check_work, claims_of_all
from .weight_changes import WeightChanges
from .weight_source import WeightSource

_ANOTHER_LOADER = "load the text encoder with ComfyUI's own loader"
_FEWER_TEXTS = "encode fewer or shorter texts at once"
_TILES = "set a tile in Parallel VAE Decode or Encode"
_MORE_DEVICES = "use more devices"
_LARGER, _WITHOUT = "use devices with more memory", "load the VAE with ComfyUI's own loader, without Parallel VAE"
"""What would work when a device has no room."""


class ComponentCache:
    """The loaded components of one checkpoint, in one dtype, on this rank's device.

    Args:
        dtype: dtype of the transformers and the text encoder.

    Attributes:
        name: the checkpoint's name in messages.
        device: this rank's device.
        parts: what is loaded.
        transformers: the transformers among them.
        layout: the layout in which a transformer was last used; None if none was.
        vae_dtype: dtype in which the VAE was last used; None if it was not.
        whole_vae: why the VAE cannot be split and runs on one rank; "" unless that is known.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, memory: DeviceMemory) -> None:
        self.checkpoint, self.dtype, self.memory = checkpoint, dtype, memory
        self.name, self.device = checkpoint.name, memory.device
        self.parts = Parts(checkpoint.name, memory)
        self.transformers = Transformers(checkpoint, dtype, self.parts)
        self.layout: ParallelLayout | None = None
        self.vae_dtype: torch.dtype | None = None
        self.whole_vae = ""

    def check(self, name: str) -> None:
        """Refuse a component that cannot be loaded, without loading it.

        Raises:
            InvalidRequest: it is missing, of an unsupported class, or stored in a way that cannot be read.
        """
        if not self.parts.has(name):
            check_component(self.checkpoint, name)

    def text_encoder(self, adapters: Sequence[Adapter], overlay: Overlay | None, work: int) -> Any:
        """Return the text encoder with these changes, a module of transformers, with room to work. Rank 0 alone does.

        Args:
            work: bytes that its tensors take at least.

        Raises:
            InvalidRequest: it does not fit on the device. Names numbers and remedies.
            NoRoom: weights and tensors together do not fit. Names numbers and remedies.
        """
        needed, weights = text_encoder_bytes(self.checkpoint, self.dtype), f"{self.name}'s text encoder"
        check_fits([self.memory.claim(needed)], weights, dtype=self.dtype, remedy=_ANOTHER_LOADER)
        check_work([self.memory.claim(needed + work)], weights, [_FEWER_TEXTS, _ANOTHER_LOADER])
        missing = 0 if self.parts.has("text_encoder") else needed
        self.memory.free_up(missing + with_slack(work), self.parts, keep=("text_encoder",))
        encoder = self.parts.get("text_encoder", self._load_text_encoder)
        self.parts.changed_by("text_encoder", lambda changes: changes.use(adapters, overlay))
        return encoder

    def _load_text_encoder(self) -> Any:
        encoder = load_text_encoder(self.checkpoint, self.dtype, self.device)
        class_name = self.checkpoint.components["text_encoder"]
        source = WeightSource(self.checkpoint.stored("text_encoder"), class_name)
        self.parts.track("text_encoder", WeightChanges(encoder, "text_encoder", class_name, source, {}))
        return encoder

    def vae(self, axis: Axis, work: int, dtype: torch.dtype) -> Any:
        """Return the VAE, a module of diffusers, with room to work. Collective over the axis.

        It is kept in one dtype, and read again in another.

        Args:
            work: bytes that this rank's tensors take at least.

        Raises:
            NoRoom: weights and tensors together do not fit. Names numbers and remedies.
        """
        if dtype != self.vae_dtype:
            self.parts.drop("vae")
            self.vae_dtype = dtype
        weights = vae_bytes(self.checkpoint, dtype)
        claims = claims_of_all(axis, self.memory.claim(weights + work))
        own = vae_of(self.checkpoint).own_tile  # one of which is the least that a rank computes
        check_work(claims, f"{self.name}'s VAE", [_LARGER, _WITHOUT] if own else [_TILES, _MORE_DEVICES])
        missing = 0 if self.parts.has("vae") else weights
        self.memory.free_up(missing + with_slack(work), self.parts, keep=("vae",), ranks=axis.size)
        return self.parts.get("vae", lambda: load_vae(self.checkpoint, self.device, dtype))

    def describe(self, stamp: str) -> LoadedModel:
        """Describe what is loaded from the files that have this stamp. Safe to call from another thread."""
        other = self.vae_dtype if self.parts.has("vae") and self.vae_dtype != self.dtype else None
        notes = [
            f"the VAE is in {NAMES[other]}" if other else "",
            f"the VAE works on one rank: {self.whole_vae}" if self.whole_vae else "",
            self.transformers.note,
            Split.of(self.layout).note if self.layout else "",
        ]
        return LoadedModel(
            path=str(self.checkpoint.path),
            stamp=stamp,
            layout=self.layout,
            dtype=NAMES[self.dtype],
            parts=self.parts.names(),
            loads=self.parts.loads,
            note="; ".join(filter(None, notes)),
        )
