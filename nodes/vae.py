"""The nodes that decode and encode in the backend, and the node that makes the VAE of any workflow parallel."""

from collections.abc import Sequence
from typing import Any

import torch
from comfy_api.latest import io
from einops import rearrange
from typing_extensions import override

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.vaes import vae_of
from .backend import checkpoints
from .backend.connection import Handle, progress_bar
from .backend.devices import expect_ranks, parse_devices
from .backend.queued_checks import refusal_by
from .bridges.announcements import flags_without_effect
from .bridges.compute_dtype import auto_vae_dtype, loaded_vae_dtype
from .loader import DEVICES_TOOLTIP, open_vae
from .picture_metadata import label_saved_images
from .remote.adopt import COPY_TEXT, copy_vae, source_file
from .remote.memory_file import MemoryFile
from .remote.upstream import Upstream, describe_reading, find_upstream, remember_source, source_changes
from .remote.vae import RemoteVAE, vae_alone

TILE_TOOLTIP = (
    "0: the whole image, exactly; each rank computes some of its rows. If that does not fit into memory: the side of a "
    "tile in pixels. Each rank computes whole tiles, which are then blended. That is approximate, and saved images say "
    "so."
)


def _shared_inputs() -> list[Any]:
    return [
        io.Vae.Input("vae", tooltip="The VAE of Parallel Loader or Parallel VAE."),
        io.Int.Input("tile", default=0, min=0, max=8192, step=64, optional=True, tooltip=TILE_TOOLTIP),
    ]


class ParallelVAE(io.ComfyNode):  # type: ignore[misc]
    """Stands behind a loader of a VAE. Outputs the same VAE on several ranks."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelVAE",
            display_name="Parallel VAE",
            category="Parallel DiT",
            description="Makes the VAE of a workflow parallel: put it behind the VAE's loader. Bypass it to run the "
            "same workflow on one GPU.",
            inputs=[
                io.Vae.Input(
                    "vae",
                    lazy=True,
                    tooltip="From Load VAE or Load Checkpoint: ComfyUI does not load the file if nothing else uses it. "
                    "From any other node, the weights are copied into memory once.",
                ),
                io.String.Input("devices", default="all", tooltip=DEVICES_TOOLTIP),
            ],
            outputs=[io.Vae.Output(tooltip="For VAEDecode, VAEEncode, Parallel VAE Decode and Parallel VAE Encode.")],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    @override
    async def validate_inputs(cls, devices: Any = "all") -> bool | str:
        """Return why the inputs cannot work, or True. ComfyUI calls this when the prompt is queued.

        A linked input is None here and is checked when the node runs.
        """
        return await refusal_by(parse_devices, devices or "all")

    @classmethod
    @override
    def fingerprint_inputs(cls, devices: Any = None, **_: Any) -> int:
        """Return how often the VAE's file has changed, so that the node runs again when it does."""
        expect_ranks(devices)
        return source_changes(cls.hidden.unique_id)

    @classmethod
    @override
    def check_lazy_status(cls, **_: Any) -> list[str]:
        """Ask for the VAE only if its file does not follow from the prompt."""
        return [] if _vae_upstream(cls.hidden) else ["vae"]

    @classmethod
    @override
    def execute(cls, vae: Any = None, devices: str = "all") -> io.NodeOutput:
        """Open the VAE's file, or take the VAE that ComfyUI has loaded. Weights load at their first use."""
        prompt, node_id = cls.hidden.dynprompt, cls.hidden.unique_id
        shown_on, upstream = prompt.get_display_node_id(node_id), _vae_upstream(cls.hidden)
        if upstream is None or upstream.model_name is None:
            handle, text = _from_loaded(vae, devices, shown_on)
            dtype = loaded_vae_dtype(vae)
        else:
            remember_source(node_id, upstream.model_name)
            handle = open_vae(checkpoints.path_of(upstream.model_name), devices, shown_on)
            text = describe_reading(prompt, upstream, node_id)
            dtype = auto_vae_dtype(vae_of(handle.checkpoint), handle.spec.devices)
        handle.keep_weights()
        text = "; ".join(filter(None, [text, flags_without_effect("vae")]))
        return io.NodeOutput(vae_alone(handle, vae_of(handle.checkpoint).scale, dtype), ui={"text": (text,)})


def _from_loaded(source: Any, devices: str, node_id: str) -> tuple[Handle, str]:
    """Return the handle of a VAE that ComfyUI has loaded, from its file or a copy of its weights, and a text."""
    if isinstance(source, RemoteVAE):
        raise InvalidRequest("the VAE is parallel already: remove Parallel VAE")
    origin = source_file(source.patcher) or copy_vae(source)
    if not isinstance(origin, MemoryFile):
        return open_vae(origin, devices, node_id), f"{origin.name}; weights load at first use"
    handle = open_vae(origin.path, devices, node_id, origin)
    origin.fill()
    return handle, f"{COPY_TEXT}; weights load at first use"


def _vae_upstream(hidden: Any) -> Upstream | None:
    """Return the VAE's loader, or None if its file does not follow from the prompt.

    Raises:
        InvalidRequest: the loader has no such file.
    """
    upstream = find_upstream(hidden.dynprompt, hidden.unique_id)
    if upstream and upstream.model_name and not checkpoints.is_file(upstream.model_name):
        raise InvalidRequest(f"{upstream.file} is no file of a VAE, which Parallel VAE needs: bypass Parallel VAE")
    return upstream


class ParallelVAEDecode(io.ComfyNode):  # type: ignore[misc]
    """LATENT to IMAGE on all ranks."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelVAEDecode",
            display_name="Parallel VAE Decode",
            category="Parallel DiT",
            description="Decodes latents into images on all ranks. The result is exact: each rank computes some rows.",
            inputs=[io.Latent.Input("samples", tooltip="The latent to decode."), *_shared_inputs()],
            outputs=[io.Image.Output(tooltip="The images, or the frames of a video in order.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    @override
    def execute(cls, samples: dict[str, Any], vae: Any, tile: int = 0) -> io.NodeOutput:
        """Decode on the ranks; of a latent with several streams, the first one, as VAEDecode does."""
        latent = samples["samples"]
        # Of video with sound, VAEDecode takes the video.
        latent = latent.unbind()[0] if latent.is_nested else latent
        remote = _remote_vae(vae, "Parallel VAE Decode", "VAEDecode")
        pixels = remote.decode_with(latent, progress_bar(), tile)
        _label_tiles(cls.hidden, remote.used_tile, pixels.shape[-3:-1])
        return io.NodeOutput(rearrange(pixels, "b t h w c -> (b t) h w c") if pixels.ndim == 5 else pixels)


class ParallelVAEEncode(io.ComfyNode):  # type: ignore[misc]
    """IMAGE to LATENT on all ranks."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelVAEEncode",
            display_name="Parallel VAE Encode",
            category="Parallel DiT",
            description="Encodes images into latents on all ranks. The result is exact: each rank computes some rows.",
            inputs=[
                io.Image.Input("pixels", tooltip="Images, or the frames of one video for a video VAE."),
                *_shared_inputs(),
            ],
            outputs=[io.Latent.Output(tooltip="The latent.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    @override
    def execute(cls, pixels: torch.Tensor, vae: Any, tile: int = 0) -> io.NodeOutput:
        """Encode on the ranks."""
        remote = _remote_vae(vae, "Parallel VAE Encode", "VAEEncode")
        latent = remote.encode_with(pixels, progress_bar(), tile)
        spatial = vae.spacial_compression_encode()
        _label_tiles(cls.hidden, remote.used_tile, [size * spatial for size in latent.shape[-2:]])
        return io.NodeOutput({"samples": latent})


def _label_tiles(hidden: Any, tile: int, size: Sequence[int]) -> None:
    """Label saved images that were computed in more than one tile.

    Args:
        hidden: the node's hidden inputs.
        tile: the side of a tile in pixels; 0 for the whole image.
        size: the image's height and width.
    """
    if tile and max(size) > tile:
        label_saved_images(hidden, {"tile": tile, "approximate": "tiles"})


def _remote_vae(vae: Any, node: str, native_node: str) -> RemoteVAE:
    if isinstance(vae, RemoteVAE):
        return vae
    raise InvalidRequest(f"{node} needs the VAE of Parallel Loader or Parallel VAE; use {native_node} for any other")
