"""What a rank does with a request: load, forward, sample, encode, decode. No sockets."""

import gc
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from . import loading, mesh, text, vae
from .checkpoint import Checkpoint
from .collectives import agree, share
from .denoiser import Denoiser
from .errors import InvalidRequest, OutOfMemory
from .layout import ParallelLayout
from .mesh import DeviceMesh
from .messages import (
    Decode,
    Encode,
    EncodeText,
    Forward,
    LoadedModel,
    ModelSpec,
    Progress,
    RankRequest,
    Sample,
    Unload,
)
from .payload import NAMES
from .pipeline import Pipeline
from .sampling import Report, SampleLoop
from .validation import Denoising, check_forward, check_sample, first_not_finite, split_names
from .wire import TensorMeta

Tensors = dict[str, Tensor]
Cancelled = Callable[[], bool]


class Engine:
    """One rank's models, meshes and work. Every rank of the world calls ``handle`` with the same message.

    ``timeout`` is the deadline of one collective: a rank that waits longer for another raises, which ends the
    set of ranks. It covers the time that a slower rank may take to load its weights.
    """

    def __init__(
        self, *, rank: int, world_size: int, device: torch.device, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        self.rank, self.world_size, self.device, self.timeout = rank, world_size, device, timeout
        self.steps = 0
        self._pipelines: dict[tuple[str, torch.dtype], Pipeline] = {}
        self._meshes: dict[ParallelLayout, DeviceMesh | None] = {}

    def handle(
        self,
        message: RankRequest,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        *,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        """Carry out one request.

        Args:
            message: the same on every rank.
            metas: what the request's tensors are, on every rank.
            tensors: the tensors themselves, on rank 0 alone.
            report: takes progress; called on rank 0 alone.
            cancelled: rank 0's own flag; the ranks agree on it before each denoiser call.

        Returns:
            The reply's tensors on rank 0, nothing on other ranks.

        Raises:
            InvalidRequest: raised alike on every rank that the request concerns.
            Cancelled: likewise.
            OutOfMemory: this rank's device is full; names the rank.
        """
        handler = _HANDLERS[type(message)]
        try:
            with torch.inference_mode():
                return handler(self, message, metas, tensors, report, cancelled)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"rank {self.rank} ({self.device}) ran out of memory: {error}") from error

    def snapshot(self) -> tuple[tuple[LoadedModel, ...], int, int]:
        """Loaded models, bytes of device memory, transformer forwards done. Safe to call from another thread."""
        models = tuple(pipeline.describe() for pipeline in list(self._pipelines.values()))
        memory = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return models, memory, self.steps

    def _forward(
        self,
        message: Forward,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        plan = check_forward(message, metas, self.world_size, self._dtype_name(message.model))
        denoiser, shared = self._denoiser(message.model, plan, metas, tensors)
        if denoiser is None:
            return {}
        branches, _ = split_names(shared, message.branches)
        own = {
            i: {name: tensor[denoiser.samples(i)] for name, tensor in branches[i].items()} for i in denoiser.branches
        }
        predictions = denoiser.gather(denoiser.shards(own))
        return {str(i): prediction.cpu() for i, prediction in predictions.items()}

    def _sample(
        self,
        message: Sample,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        plan = check_sample(message, metas, self.world_size, self._dtype_name(message.model))
        denoiser, shared = self._denoiser(message.model, plan, metas, tensors)
        if denoiser is None:
            return {}
        loop = SampleLoop(denoiser, message, shared, report=report, cancelled=cancelled)
        return {name: tensor.cpu() for name, tensor in loop.run().items()}

    def _encode_text(
        self,
        message: EncodeText,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        if tensors is None:
            return {}
        text.check(metas)
        pipeline = self._pipeline(message.model)
        loading.check_component(pipeline.checkpoint, "text_encoder", loading.TEXT_ENCODERS)
        ids, lengths = (tensors[name].to(self.device) for name in ("ids", "lengths"))
        return {"embeds": text.encode(pipeline.text_encoder(), ids, lengths).cpu()}

    def _decode(
        self,
        message: Decode,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        if tensors is None:
            return {}
        module, tick = self._vae(message, metas, tensors, "latent", report, cancelled)
        return {"pixels": vae.decode(module, tensors["latent"].to(self.device), tick)}

    def _encode(
        self,
        message: Encode,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        if tensors is None:
            return {}
        module, tick = self._vae(message, metas, tensors, "pixels", report, cancelled)
        return {"latent": vae.encode(module, tensors["pixels"].to(self.device), tick).cpu()}

    def _unload(
        self,
        message: Unload,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        report: Report,
        cancelled: Cancelled,
    ) -> Tensors:
        for key in [key for key in self._pipelines if key[0] == message.model.path]:
            del self._pipelines[key]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def _denoiser(
        self,
        model: ModelSpec,
        plan: Denoising,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
    ) -> tuple[Denoiser | None, Tensors]:
        """Share the tensors, refuse bad values on all ranks alike, and only then load what is missing."""
        loading.check_component(Checkpoint.open(model.path), "transformer", loading.TRANSFORMERS)
        devices = self._mesh(plan.layout)
        if devices is None:
            return None, {}
        bad = agree(first_not_finite(tensors) if tensors is not None else -1, devices.whole)
        if bad >= 0:
            raise InvalidRequest(
                f"{metas[bad].name} holds NaN or infinity: check the latent, the conditioning and the nodes before"
            )
        shared = share(metas, tensors, devices.whole, self.device)
        return Denoiser(self._pipeline(model).transformer(), devices, plan, self._count), shared

    def _vae(
        self,
        message: Decode | Encode,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor],
        name: str,
        report: Report,
        cancelled: Cancelled,
    ) -> tuple[Any, vae.Tick]:
        pipeline = self._pipeline(message.model)
        loading.check_component(pipeline.checkpoint, "vae", loading.VAES)
        vae.check(metas, pipeline.checkpoint.config("vae"), name=name)
        if first_not_finite(tensors) >= 0:
            raise InvalidRequest(f"{name} holds NaN or infinity: check the nodes before")
        phase = "decoding" if name == "latent" else "encoding"
        tick = vae.ticker(lambda done, total: report(Progress(phase=phase, value=done, total=total), {}), cancelled)
        return pipeline.vae(), tick

    def _mesh(self, layout: ParallelLayout) -> DeviceMesh | None:
        if layout not in self._meshes:
            self._meshes[layout] = mesh.create(layout, rank=self.rank, timeout=self.timeout)
        return self._meshes[layout]

    def _pipeline(self, model: ModelSpec) -> Pipeline:
        checkpoint = Checkpoint.open(model.path)
        dtype = loading.resolve_dtype(checkpoint, model.dtype, self.device)
        key = (model.path, dtype)
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(checkpoint, dtype, self.device)
        return self._pipelines[key]

    def _dtype_name(self, model: ModelSpec) -> str:
        return NAMES[loading.resolve_dtype(Checkpoint.open(model.path), model.dtype, self.device)]

    def _count(self) -> None:
        self.steps += 1


_HANDLERS: dict[type[RankRequest], Callable[..., Tensors]] = {
    Forward: Engine._forward,
    Sample: Engine._sample,
    EncodeText: Engine._encode_text,
    Decode: Engine._decode,
    Encode: Engine._encode,
    Unload: Engine._unload,
}
