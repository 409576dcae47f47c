"""Decode and encode by all ranks: each has some of the rows, or of the tiles, and the first one what comes of them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import kernels
from ..autoencoder import codec, tiles
from ..autoencoder.spatial import Rows, Unsplittable, split
from ..autoencoder.tiles import Side, Tiles
from ..distributed.collectives import agree, gather
from ..distributed.mesh import Axis, DeviceMesh
from ..distributed.mesh_cache import MeshCache
from ..distributed.peak_memory import PeakMemory
from ..distributed.sent_bytes import Measured
from ..distributed.stop_flags import StopFlags
from ..errors import Cancelled, InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..loading.components import ComponentCache
from ..protocol.messages import Decode, Encode, Progress
from ..vaes import vae_of
from .request import ActiveRequest, Tensors
from .validation import first_not_finite

log = logging.getLogger(__name__)


class Autoencoding:
    """One request for the VAE, on one rank.

    Raises:
        InvalidRequest: there is no VAE that can be used, or what it is given does not fit it.
    """

    def __init__(self, call: ActiveRequest[Decode] | ActiveRequest[Encode], pipeline: ComponentCache) -> None:
        pipeline.check("vae")
        self.call, self.pipeline, self.kind = call, pipeline, vae_of(pipeline.checkpoint)
        latent, pixels = Side(dims=(-2, -1), scale=1), Side(dims=(-3, -2), scale=self.kind.scale.spatial)
        if isinstance(call.message, Decode):
            self.given, self.made, self.doing, self.sides = "latent", "pixels", "decoding", (latent, pixels)
            self.work: Callable[..., Tensor] = partial(codec.decode, clamp=call.message.clamp)
        else:
            self.given, self.made, self.doing, self.sides = "pixels", "latent", "encoding", (pixels, latent)
            self.work = codec.encode
        codec.check(call.metas, self.kind, name=self.given, tile=call.message.tile)
        before = self.sides[0]
        height, width = (call.metas[0].shape[dim] // before.scale for dim in before.dims)
        self.height, cut = height, Tiles((height, width), call.message.tile // pixels.scale or max(height, width))
        self.tiles = cut if len(cut.places) > 1 else None

    def run(self, meshes: MeshCache, device: torch.device) -> Tensors:
        """The result on rank 0, nothing on other ranks."""
        model = self.call.message.model
        ranks = model.layout.ranks if model.layout else len(model.devices.indices)
        parts = len(self.tiles.places) if self.tiles else self.height
        # Every rank asks for both meshes, be it in them or not: groups are made by all ranks together.
        alone, together = (meshes.get(ParallelLayout(ring=size)) for size in (1, min(ranks, parts)))
        if together is None:
            return {}
        # Ranks may know differently whether it can be split: the first one has met all requests.
        if self.tiles or not agree(int(bool(self.pipeline.whole_vae)), together.whole):
            try:
                return self._on(together, device)
            except Unsplittable as reason:
                self.pipeline.whole_vae = str(reason)
                log.warning("the VAE works on one rank: %s", reason)
        return {} if alone is None else self._on(alone, device)

    def _on(self, mesh: DeviceMesh, device: torch.device) -> Tensors:
        message, axis = self.call.message, mesh.whole
        if agree(first_not_finite(self.call.tensors or {}), axis) >= 0:
            raise InvalidRequest(f"{self.given} holds NaN or infinity: check the nodes before")
        with self.call.loading(self.pipeline, "vae"):
            module = self.pipeline.vae()
        with ExitStack() as stack:
            counts = message.measure or message.timed
            measured = stack.enter_context(Measured(axis, device, count=message.measure)) if counts else None
            growth = stack.enter_context(PeakMemory(device)) if message.measure else None
            made = self._tiled(module, mesh, device) if self.tiles else self._whole(module, mesh, device)
        done = {} if axis.index else {self.made: made.cpu()}
        if measured:
            done |= measured.of_all_ranks()
        if growth:
            grown = torch.cat(gather(torch.tensor([growth.bytes]), [1] * axis.size, axis))
            done |= {} if axis.index else {"grown_bytes": grown}
        return done

    def _whole(self, module: Any, mesh: DeviceMesh, device: torch.device) -> Tensor:
        given = self.call.tensors[self.given] if self.call.tensors else None
        note = f"on one rank: {self.pipeline.whole_vae}" if self.pipeline.whole_vae else ""
        with self._ticking(mesh.whole, device, note) as tick:
            if mesh.whole.size == 1:
                assert given is not None
                return self.work(self.kind, module, given.to(device), tick)
            rows = Rows(axis=mesh.axes["ring"], latent=Partition.even(self.height, mesh.whole.size))
            with split(module, rows, kernels.KERNELS["sdpa"]):
                own = rows.scatter(given, self.call.metas[0], self.sides[0].dims[0], device)
                return self.work(self.kind, module, own, tick, rows)

    def _tiled(self, module: Any, mesh: DeviceMesh, device: torch.device) -> Tensor:
        assert self.tiles
        axis = mesh.axes["ring"]  # not the flags': what one rank sends another in one group arrives in its order
        given = self.call.tensors[self.given] if self.call.tensors else None
        before, after = self.sides
        take = partial(self.tiles.scatter, given, self.call.metas[0], before, axis, device)
        with self._ticking(mesh.whole, device, f"approximate: tiles of {self.call.message.tile} pixels") as tick:
            return tiles.run(self.tiles, take, after, partial(self._tile, module), tick, axis)

    def _tile(self, module: Any, given: Tensor) -> Tensor:
        return self.work(self.kind, module, given, lambda done, total: None)

    @contextmanager
    def _ticking(self, axis: Axis, device: torch.device, note: str) -> Iterator[codec.Tick]:
        """Report what is done, and end the work, on all ranks of the axis alike, when the request was cancelled."""
        flags = StopFlags(axis, device, self.call.cancelled)

        def tick(done: int, total: int) -> None:
            if not flags.go_on():
                raise Cancelled(f"{self.doing} was cancelled")
            if done < total:
                flags.tell()
            if axis.index == 0:
                self.call.report(Progress(phase=self.doing, value=done, total=total, note=note), {})

        try:
            yield tick
        except (Cancelled, InvalidRequest, Unsplittable):  # which all ranks raise alike
            flags.finish()
            raise
        flags.finish()
