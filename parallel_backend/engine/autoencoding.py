"""Decode or encode on all ranks: each computes some rows, or some tiles, and rank 0 gets the result."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import kernels
from ..autoencoder import codec, tiles
from ..autoencoder.chunks import Chunks
from ..autoencoder.own_tiles import OwnTiles
from ..autoencoder.pace import INTERVAL, Pace
from ..autoencoder.spatial import RowSplit, Unsplittable, split
from ..autoencoder.tiles import Tiles, TileSpace
from ..distributed.collectives import agree, refused_alike
from ..distributed.mesh import Axis, RankMesh
from ..distributed.mesh_cache import MeshCache
from ..errors import Cancelled, NoRoom
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.split import Split
from ..loading.components import ComponentCache
from ..loading.load import check_dtype, resolve_vae_dtype
from ..progress import PROGRESS
from ..protocol.messages import Decode, Encode, Progress
from ..vaes import vae_of
from .counting import counted
from .request import ActiveRequest, Tensors, measured
from .working_memory import coding_bytes

log = logging.getLogger(__name__)

Code = Callable[[Any, RankMesh, torch.device], Tensor]
"""Decodes or encodes with a module, on a mesh and a device. The result is on rank 0."""


class Autoencoding:
    """One ``Decode`` or ``Encode`` request on this rank.

    Args:
        bfloat16: whether the devices of all ranks have bfloat16.
        speeds: relative speed of each rank, for a model without a layout; empty if all are equal.

    Raises:
        InvalidRequest: the checkpoint has no VAE that can be used, or the request's tensor does not fit it.
    """

    def __init__(
        self,
        request: ActiveRequest[Decode] | ActiveRequest[Encode],
        components: ComponentCache,
        *,
        bfloat16: bool,
        speeds: tuple[float, ...] = (),
    ) -> None:
        components.check("vae")
        self.request, self.components, self.vae = request, components, vae_of(components.checkpoint)
        self.dtype = resolve_vae_dtype(self.vae, request.message.dtype, components.device, bfloat16=bfloat16)
        latent, pixels = TileSpace(dims=(-2, -1), scale=1), TileSpace(dims=(-3, -2), scale=self.vae.scale.spatial)
        if isinstance(request.message, Decode):
            self.input, self.output, self.phase, self.sides = "latent", "pixels", "decoding", (latent, pixels)
            self.code: Callable[..., Tensor] = codec.decode
        else:
            self.input, self.output, self.phase, self.sides = "pixels", "latent", "encoding", (pixels, latent)
            self.code = codec.encode
        codec.check_request(request.metas, self.vae, name=self.input, tile=request.message.tile)
        before = self.sides[0]
        self.height, self.width = (request.metas[0].shape[dim] // before.scale for dim in before.dims)
        tile = request.message.tile // pixels.scale or max(self.height, self.width)
        cut = Tiles((self.height, self.width), tile)
        self.tiles = cut if len(cut.places) > 1 else None
        shape, encode = request.metas[0].shape, self.output == "latent"
        self.chunks = Chunks.of(self.vae, shape, encode=encode)
        model = request.message.model
        self.ranks = model.layout.ranks if model.layout else len(model.devices.indices)
        self.speeds = () if model.layout or self.ranks == 1 else speeds
        self.own_tiles = OwnTiles.of(self.vae, shape, encode=encode, speeds=self._split(self.ranks).speeds)

    def run(self, meshes: MeshCache, device: torch.device) -> Tensors:
        """Returns the result on rank 0, an empty dict on other ranks."""
        ranks = self.ranks
        parts = len(self.tiles.places) if self.tiles else self.height
        parts = len(self.own_tiles.parts) if self.own_tiles else parts
        # Every rank asks for both meshes, even outside of them: all ranks make process groups together.
        alone, together = (meshes.get(ParallelLayout(ring=size)) for size in (1, min(ranks, parts)))
        if together is None:
            return {}
        if self.own_tiles:
            return self._run_on(together, device)
        alike = len(set(self._split(ranks).speeds)) == 1  # chunks of time are too few for shares by speed
        if not self.tiles and together.all_ranks.size == ranks and alike and self.chunks.keep_busy(ranks):
            with suppress(NoRoom):  # a rank would have room for a part of each frame
                return self._run_on(together, device, self._by_time)
        # Ranks may differ in whether they know that this VAE cannot be split. Rank 0 took part in all requests.
        if self.tiles or not agree(int(bool(self.components.whole_vae)), together.all_ranks):
            try:
                if self.speeds and not self.tiles:
                    with suppress(NoRoom):  # a faster rank may have less memory
                        return self._run_on(together, device)
                    self.speeds = ()
                return self._run_on(together, device)
            except Unsplittable as reason:
                self.components.whole_vae = str(reason)
                log.warning("the VAE works on one rank: %s", reason)
        return {} if alone is None else self._run_on(alone, device)

    def _run_on(self, mesh: RankMesh, device: torch.device, code: Code | None = None) -> Tensors:
        message, axis = self.request.message, mesh.all_ranks
        self.request.check_finite(axis)
        with refused_alike(axis):
            check_dtype(self.dtype, device)
        with self.request.loading(self.components, "vae"):
            module = self.components.vae(axis, self._work(axis, by_time=code == self._by_time), self.dtype)
        with ExitStack() as stack:
            stack.enter_context(counted(module, self.phase))
            measurement = stack.enter_context(measured(message, axis, device))
            output = (code or self._chosen())(module, mesh, device)
        results = {} if axis.index else {self.output: output.cpu()}
        if measurement:
            results |= measurement.of_all_ranks()
        return results

    def _chosen(self) -> Code:
        if self.own_tiles:
            return self._in_own_tiles
        return self._tiled if self.tiles else self._whole

    def _work(self, axis: Axis, *, by_time: bool) -> int:
        """Return the bytes that this rank's tensors take at least."""
        scale, shape = self.vae.scale, self.request.metas[0].shape
        encodes, frames = isinstance(self.request.message, Encode), 1
        if scale.video:
            frames = self.vae.encoded_frames(shape[1]) if encodes else self.vae.pixel_frames(shape[2])
        rows, width = self._rows(axis).sizes[axis.index], self.width
        if by_time:
            rows, frames = self.height, self.chunks.longest if encodes else self.vae.pixel_frames(self.chunks.longest)
        tile = (self.request.message.tile or self.vae.own_tile) // scale.spatial
        if tile:
            rows, width = min(self.height, tile), min(width, tile)
        if self.own_tiles:
            frames = self.own_tiles.longest
        kind = self.components.checkpoint.components["vae"]
        pixels = rows * width * scale.spatial**2
        joined = (
            0 if self.own_tiles is None or axis.index else self.own_tiles.joined_bytes(axis.size, self.dtype.itemsize)
        )
        return joined + coding_bytes(
            kind, self.vae.config, pixels=pixels, frames=frames, encode=encodes, itemsize=self.dtype.itemsize
        )

    def _split(self, ranks: int) -> Split:
        balance = self.speeds[:ranks] if ranks > 1 else ()
        return Split.of(self.request.message.model.layout or ParallelLayout(ring=ranks, balance=balance))

    def _rows(self, axis: Axis) -> Partition:
        """Split the rows of the latent over ranks by their speeds, if the layout or a plan gives them."""
        return self._split(axis.size).rows(self.height, axis.size)

    def _whole(self, module: Any, mesh: RankMesh, device: torch.device) -> Tensor:
        tensor = self.request.tensors[self.input] if self.request.tensors else None
        note = f"on one rank: {self.components.whole_vae}" if self.components.whole_vae else ""
        tick = self._ticker(mesh.all_ranks, device, note)
        if mesh.all_ranks.size == 1:
            assert tensor is not None
            return self.code(self.vae, module, tensor.to(device), tick)
        rows = RowSplit(axis=mesh.axes["ring"], latent=self._rows(mesh.all_ranks))
        with split(module, rows, kernels.KERNELS["sdpa"]):
            local = rows.scatter(tensor, self.request.metas[0], self.sides[0].dims[0], device)
            return self.code(self.vae, module, local, tick, rows)

    def _by_time(self, module: Any, mesh: RankMesh, device: torch.device) -> Tensor:
        tensor = self.request.tensors[self.input] if self.request.tensors else None
        meta, axis = self.request.metas[0], mesh.axes["ring"]
        return self.chunks.process(
            tensor, meta, self._result_shape(meta.shape), partial(self._tile, module),
            self._ticker(axis, device, "", waits=False), axis, device,
        )  # fmt: skip

    def _in_own_tiles(self, module: Any, mesh: RankMesh, device: torch.device) -> Tensor:
        assert self.own_tiles
        tensor, axis = self.request.tensors[self.input] if self.request.tensors else None, mesh.axes["ring"]
        tick = self._ticker(axis, device, "", waits=False)
        return self.own_tiles.process(module, tensor, self.request.metas[0], tick, axis, device)

    def _result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a video's result."""
        scale = self.vae.scale
        if self.output == "latent":
            return shape[0], scale.channels, self.vae.latent_frames(shape[1]), self.height, self.width
        return (shape[0], self.vae.pixel_frames(shape[2]), self.height * scale.spatial, self.width * scale.spatial, 3)

    def _tiled(self, module: Any, mesh: RankMesh, device: torch.device) -> Tensor:
        assert self.tiles
        axis = mesh.axes["ring"]
        tensor = self.request.tensors[self.input] if self.request.tensors else None
        before, after = self.sides
        take = partial(self.tiles.scatter, tensor, self.request.metas[0], before, axis, device)
        note = f"approximate: tiles of {self.request.message.tile} pixels"
        tick = self._ticker(mesh.all_ranks, device, note)
        return tiles.process_tiles(self.tiles, take, after, partial(self._tile, module), tick, axis)

    def _tile(self, module: Any, tile: Tensor) -> Tensor:
        return self.code(self.vae, module, tile, lambda done, total: None)

    def _ticker(self, axis: Axis, device: torch.device, note: str, *, waits: bool = True) -> codec.ProgressCallback:
        """Return a callback that reports progress, and that raises ``Cancelled`` on all ranks alike after a cancel.

        Where bytes are counted it does so after each part, so that they do not depend on time.
        """
        interval = 0.0 if self.request.message.measure == "bytes" else INTERVAL
        # Who writes frames waits for those of the part before.
        waits = waits and self.vae.writes_each_unit and self.output == "pixels" and not self.tiles
        pace = Pace(axis, None if waits else device, self.request.cancelled, interval)

        def tick(done: int, total: int) -> None:
            PROGRESS.step(done, total)
            if not pace.part_done() and done < total:
                return
            if done < total and not pace.go_on():
                raise Cancelled(f"{self.phase} was cancelled")
            if axis.index == 0:
                self.request.report(Progress(phase=self.phase, value=done, total=total, note=note), {})

        return tick
