"""What a rank does with a request: load, forward, sample, encode, decode. No sockets."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..attention import kernels
from ..checkpoint.checkpoint import HIGH, LOW, Checkpoint
from ..denoiser.denoiser import Denoiser
from ..denoiser.experts import Experts
from ..denoiser.plan import DenoisingPlan, split_names
from ..distributed import sent_bytes
from ..distributed.collectives import agree, share
from ..distributed.mesh import DeviceMesh
from ..distributed.mesh_cache import MeshCache
from ..errors import InvalidRequest, OutOfMemory
from ..interfaces.family import Family
from ..loading.components import ComponentCache, free
from ..loading.load import resolve_dtype
from ..models import family_of
from ..protocol.frames import TensorMeta
from ..protocol.messages import (
    Decode,
    DType,
    Encode,
    EncodeText,
    Forward,
    LoadedModel,
    ModelSpec,
    RankRequest,
    Sample,
    Unload,
)
from ..step_loop.pipefusion import PipeFusion
from ..step_loop.sample_loop import SampleLoop
from ..step_loop.setting import Report, Setting
from . import text_encoding
from .autoencoding import Autoencoding
from .request import ActiveRequest, Tensors
from .validation import check_forward, check_sample, first_not_finite, first_outside

log = logging.getLogger(__name__)

_Key = tuple[str, str, DType]
"""Path, stamp and dtype of a ``ModelSpec``."""


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
        self._pipelines: dict[_Key, ComponentCache] = {}
        self._meshes = MeshCache(rank, world_size, device, timeout=timeout, in_use=self._meshes_in_use)

    def handle(
        self,
        message: RankRequest,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        *,
        report: Report,
        cancelled: Callable[[], bool],
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
        call = ActiveRequest(message=message, metas=metas, tensors=tensors, report=report, cancelled=cancelled)
        try:
            with torch.inference_mode():
                return _HANDLERS[type(message)](self, call)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"rank {self.rank} ({self.device}) ran out of memory: {error}") from error

    def snapshot(self) -> tuple[tuple[LoadedModel, ...], int, int]:
        """Loaded models, bytes of device memory, transformer forwards done. Safe to call from another thread."""
        pipelines = dict.fromkeys(list(self._pipelines.values()))
        models = tuple(model for model in (pipeline.describe() for pipeline in pipelines) if model.parts)
        memory = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return models, memory, self.steps

    def _forward(self, call: ActiveRequest[Forward]) -> Tensors:
        pipeline = self._pipeline(call.message.model)
        plan = check_forward(call.message, call.metas, pipeline.checkpoint, self.world_size)
        denoiser, shared = self._denoiser(call, plan, pipeline)
        if denoiser is None:
            return {}
        branches, _ = split_names(shared, call.message.branches)
        own = {
            i: {name: tensor[denoiser.samples(i)] for name, tensor in branches[i].items()} for i in denoiser.branches
        }
        denoiser.load(own)
        with self._measured(call.message, denoiser.mesh) as measured:
            predictions = denoiser.gather(denoiser.shards(own))
        done = {str(i): prediction.cpu() for i, prediction in predictions.items()}
        return done | (measured.of_all_ranks() if measured else {})

    def _measured(
        self, message: Forward | Sample, mesh: DeviceMesh
    ) -> AbstractContextManager[sent_bytes.Measured | None]:
        """What takes the time and counts the bytes of a message that asks for it."""
        if not (message.measure or message.timed):
            return nullcontext()
        return sent_bytes.Measured(mesh.whole, self.device, count=message.measure)

    def _sample(self, call: ActiveRequest[Sample]) -> Tensors:
        pipeline = self._pipeline(call.message.model)
        plan = check_sample(call.message, call.metas, pipeline.checkpoint, self.world_size)
        denoiser, shared = self._denoiser(call, plan, pipeline)
        if denoiser is None:
            return {}
        setting = Setting(denoiser, call.message, shared)
        if call.message.measure or call.message.timed:
            setting.load()
        kind = PipeFusion if plan.layout.pipe > 1 else SampleLoop
        with self._measured(call.message, denoiser.mesh) as measured:
            loop = kind(setting, report=call.report, cancelled=call.cancelled)
            done = {name: tensor.cpu() for name, tensor in loop.run().items()}
        return done | (measured.of_all_ranks() if measured else {})

    def _encode_text(self, call: ActiveRequest[EncodeText]) -> Tensors:
        if call.tensors is None:
            return {}
        text_encoding.check(call.metas)
        pipeline = self._pipeline(call.message.model)
        pipeline.check("text_encoder")
        ids, lengths = (call.tensors[name].to(self.device) for name in ("ids", "lengths"))
        with call.loading(pipeline, "text_encoder"):
            encoder = pipeline.text_encoder()
        return {"embeds": text_encoding.encode(encoder, ids, lengths, layer=call.message.layer).cpu()}

    def _code(self, call: ActiveRequest[Decode] | ActiveRequest[Encode]) -> Tensors:
        return Autoencoding(call, self._pipeline(call.message.model)).run(self._meshes, self.device)

    def _unload(self, call: ActiveRequest[Unload]) -> Tensors:
        self._pipelines.pop(_key(call.message.model), None)
        free(self.device)
        return {}

    def _make_room(self, wanted: ComponentCache) -> bool:
        """Forget the models other than ``wanted``, which their next use loads again; whether there were any."""
        others = [key for key, pipeline in self._pipelines.items() if pipeline is not wanted]
        for key in others:
            log.warning("the device is full: %s is unloaded to make room for %s", key[0], wanted.checkpoint.path)
            del self._pipelines[key]
        free(self.device)
        return bool(others)

    def _denoiser(
        self, call: ActiveRequest[Any], plan: DenoisingPlan, pipeline: ComponentCache
    ) -> tuple[Denoiser | None, Tensors]:
        """Share the tensors, refuse bad values on all ranks alike, and only then load what is missing."""
        for name in (HIGH, LOW):
            if name == HIGH or name in pipeline.checkpoint.components:
                pipeline.check(name)
        devices = self._meshes.get(plan.layout.cut)
        if devices is None:
            return None, {}
        heads = {site.head_dim for site in plan.geometry.sites}
        kernel = kernels.choose(call.message.model.attention, self.device, pipeline.dtype, heads)
        pipeline.agree(devices)
        bad = agree(first_not_finite(call.tensors or {}), devices.whole)
        if bad >= 0:
            raise InvalidRequest(
                f"{call.metas[bad].name} holds NaN or infinity: check the latent, the conditioning and the nodes before"
            )
        self._check_rows(call, pipeline.checkpoint, devices)

        def load(component: str) -> Family:
            with call.loading(pipeline, component):
                return pipeline.transformer(devices, component)

        experts = Experts(pipeline.checkpoint, load)
        if agree(int(experts.needs_both(call.tensors or {})), devices.whole):
            raise InvalidRequest("one call has timesteps for both transformers of the model: make them two calls")
        shared = share(call.metas, call.tensors, devices.whole, self.device)
        return Denoiser(experts, devices, plan, kernel, self._count), shared

    def _check_rows(self, call: ActiveRequest[Any], checkpoint: Checkpoint, devices: DeviceMesh) -> None:
        """Refuse numbers that a table of the model lacks, on all ranks alike."""
        rows = family_of(checkpoint.components["transformer"]).tables(checkpoint.config("transformer"))
        if not rows:
            return
        index, value = (agree(found, devices.whole) for found in first_outside(call.tensors or {}, rows))
        if index >= 0:
            name = call.metas[index].name
            most = rows[name.rpartition(".")[2]] - 1
            raise InvalidRequest(f"{name} holds {value}, and this model knows 0 to {most} (the last one is none)")

    def _meshes_in_use(self) -> list[DeviceMesh]:
        return [mesh for pipeline in self._pipelines.values() for mesh in pipeline.meshes()]

    def _pipeline(self, model: ModelSpec) -> ComponentCache:
        """The model's pipeline, which has loaded nothing yet if it is new. ``auto`` shares what it resolves to."""
        key = _key(model)
        if key not in self._pipelines:
            self._forget_replaced(model)
            checkpoint = Checkpoint.open(model.path)
            dtype = resolve_dtype(checkpoint, model.dtype, self.device)
            same = [p for (path, _, _), p in self._pipelines.items() if path == model.path and p.dtype == dtype]
            self._pipelines[key] = same[0] if same else self._new_pipeline(checkpoint, dtype)
        return self._pipelines[key]

    def _forget_replaced(self, model: ModelSpec) -> None:
        """Free what was loaded from other files under the same path."""
        for key in [key for key in self._pipelines if key[0] == model.path and key[1] != model.stamp]:
            del self._pipelines[key]
            free(self.device)

    def _new_pipeline(self, checkpoint: Checkpoint, dtype: torch.dtype) -> ComponentCache:
        pipeline = ComponentCache(checkpoint, dtype, self.device, lambda: self._make_room(pipeline))
        return pipeline

    def _count(self) -> None:
        self.steps += 1


def _key(model: ModelSpec) -> _Key:
    return model.path, model.stamp, model.dtype


_HANDLERS: dict[type[RankRequest], Callable[..., Tensors]] = {
    Forward: Engine._forward,
    Sample: Engine._sample,
    EncodeText: Engine._encode_text,
    Decode: Engine._code,
    Encode: Engine._code,
    Unload: Engine._unload,
}
