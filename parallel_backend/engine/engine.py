"""What a rank does with each kind of request. No sockets."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checkpoint.opening import open_checkpoint
from ..distributed import bfloat16
from ..distributed.collectives import lowest
from ..distributed.device_memory import ran_out
from ..distributed.mesh import Axis, RankMesh
from ..distributed.mesh_cache import MeshCache
from ..distributed.world import world
from ..errors import NoRoom, OutOfMemory
from ..loading.components import ComponentCache
from ..loading.load import check_dtype, resolve_dtype
from ..loading.original_weights import read_original
from ..loading.parts import DeviceMemory, Parts, free
from ..progress import LOADING, PROGRESS
from ..protocol.frames import TensorMeta
from ..protocol.messages import Decode, Encode, EncodeText, Forward, RankRequest, ReadWeights, Sample, Trial, Unload
from ..protocol.model_spec import DType, ModelSpec
from ..protocol.run_key import run_key
from ..protocol.status import LoadedModel
from ..step_loop.sampling_context import Report
from . import text_encoding, trials
from .agreements import Agreements
from .autoencoding import Autoencoding
from .counting import counted
from .denoising import Denoising, further_steps
from .elsewhere import Elsewhere
from .kept_tensors import KeptTensors
from .planned import Planned, Planner
from .request import ActiveRequest, NextStep, Tensors, no_step
from .runs import Runs
from .sampling import Sampling
from .shared_tensors import complete
from .validation import read_shapes
from .working_memory import text_bytes

OwnTrial = Callable[[Trial, Mapping[str, Tensor], Axis, torch.device], Tensors]

_Kind = TypeVar("_Kind", bound=Denoising)
_Key = tuple[str, str, DType]
"""Path, stamp and dtype of a ``ModelSpec``."""

_NOT_FINITE, _ANEW, _REPEATS = range(3)
"""What a rank says of a request: the smallest number of all ranks holds."""


class Engine:
    """One rank's models and meshes. Every rank of the world makes one and calls ``handle`` with the same message.

    Args:
        timeout: deadline of one collective. A rank that waits longer for another rank raises, which ends the set of
            ranks. It has to be long enough for a slower rank to load its weights.
        elsewhere: the other machines; None if there are none.

    Attributes:
        planner: chooses the layouts of models that ask for it; None leaves them to the rule of ``layout.choice``.
        trials: what a ``Trial`` does, by its name, besides what ``trials.run`` knows. Rank 0 alone has the tensors.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta = timedelta(minutes=10),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.rank, self.world_size, self.device, self.timeout = rank, world_size, device, timeout
        self.steps, self.elsewhere = 0, elsewhere
        self.trials: Mapping[str, OwnTrial] = {}
        self.planner: Planner | None = None
        self._speeds: tuple[float, ...] = ()
        self._bfloat16 = bfloat16.native_everywhere(device, world_size)
        self._models: dict[_Key, ComponentCache] = {}
        self._memory = DeviceMemory(device, self._parts, world_size)
        self._agreements = Agreements(world=world(rank, world_size))
        self._kept, self._runs = KeptTensors(), Runs()
        self._memory.forget_runs, self._memory.forget_tensors = self._runs.clear, self._forget_tensors
        self._meshes = MeshCache(
            rank, world_size, device, timeout=timeout, in_use=self._meshes_in_use, on_free=self._runs.clear
        )

    def handle(
        self,
        message: RankRequest,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        *,
        report: Report,
        cancelled: Callable[[], bool],
        next_step: NextStep = no_step,
    ) -> Tensors:
        """Carry out one request.

        Args:
            message: the same on every rank.
            metas: names, dtypes and shapes of the request's tensors, on every rank.
            tensors: the tensors, on rank 0 only. It leaves out those of ``kept_names``, and those that equal others.
            report: takes progress. Called on rank 0 only.
            cancelled: whether the client cancelled, read on rank 0 only. The ranks agree on it before each
                denoiser call.
            next_step: see ``ActiveRequest``.

        Returns:
            The reply's tensors on rank 0, an empty dict on other ranks.

        Raises:
            InvalidRequest: on every rank that takes part, alike.
            Cancelled: on every rank that takes part, alike.
            NoRoom: on every rank that takes part, alike. The weights stay.
            OutOfMemory: this rank's device is full, and other ranks may wait for it. Names the rank.
        """
        try:
            if self.elsewhere:
                message = self.elsewhere.localised(message)
            whole = None if tensors is None else complete(metas, tensors, self._kept)
            request = ActiveRequest(
                message=message, metas=metas, tensors=whole, received=tuple(tensors or ()), report=report,
                cancelled=cancelled, next_step=next_step,
            )  # fmt: skip
            with torch.inference_mode():
                return _HANDLERS[type(message)](self, request)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            kind = NoRoom if self.world_size == 1 else OutOfMemory
            raise kind(f"rank {self.rank} ({self.device}) ran out of memory: {error}") from error

    def rest(self) -> None:
        """Free what is kept for a request that has not come. No rank waits for another."""
        with torch.inference_mode():
            self._memory.free_unused_weights()

    def snapshot(self) -> tuple[tuple[LoadedModel, ...], int, int]:
        """Loaded models, bytes of device memory, and number of transformer forwards. Safe to call from any thread."""
        stamps = {components: stamp for (_, stamp, _), components in list(self._models.items())}
        described = [components.describe(stamp) for components, stamp in stamps.items()]
        models = tuple(each for each in described if each.parts)
        if self.elsewhere:
            models = tuple(replace(each, path=self.elsewhere.original(each.path)) for each in models)
        memory = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return models, memory, self.steps

    def kept_names(self, message: RankRequest, metas: tuple[TensorMeta, ...]) -> tuple[str, ...]:
        """Return the names of a request's tensors that this rank has. Other ranks may lack some of them."""
        return self._kept.names(metas) if isinstance(message, Forward | Sample) else ()

    def _forward(self, request: ActiveRequest[Forward]) -> Tensors:
        key = run_key(request.message, request.metas)
        run = self._repeated(key, request) if key else None
        with run or self._denoising(Denoising, request) as current:
            results = current.repeat(request) if run else current.forward()
            if key:
                results = further_steps(current, request, results, self._agreements.world)
                self._runs.put(key, current)
        return results

    def _repeated(self, key: Hashable, request: ActiveRequest[Forward]) -> Denoising | None:
        """Return the run that a request repeats, if all ranks have it. Collective over the world.

        Raises:
            InvalidRequest: a tensor holds NaN or infinity.
        """
        run, bad = self._runs.get(key), request.first_not_finite()
        can = run is not None and run.fits(request) and not run.outdated(request)
        agreed = lowest(_NOT_FINITE if bad >= 0 and can else _REPEATS if can else _ANEW, self._agreements.world)
        if agreed == _NOT_FINITE:
            raise request.not_finite(max(0, bad))
        return self._runs.take(key) if agreed == _REPEATS else None

    def _forget_tensors(self) -> bool:
        """Forget runs and kept tensors. Return whether any tensor was kept."""
        self._runs.clear()
        return self._kept.clear()

    def _sample(self, request: ActiveRequest[Sample]) -> Tensors:
        sampling = self._denoising(Sampling, request)
        with sampling:
            return sampling.sample()

    def _denoising(self, kind: type[_Kind], request: ActiveRequest[Forward] | ActiveRequest[Sample]) -> _Kind:
        components = self._components(request.message.model)
        return kind(
            request, components, self._meshes, self._agreements, self._kept, self.elsewhere, self._count_forward,
            self._planned if self.planner else None,
        )  # fmt: skip

    def _planned(self, *asked: Any) -> Planned:
        """Ask the planner, and note how fast it thinks the ranks are."""
        assert self.planner
        found = self.planner(*asked)
        if found.layout is not None:
            self._speeds = found.speeds
        return found

    def _encode_text(self, request: ActiveRequest[EncodeText]) -> Tensors:
        if request.tensors is None:
            return {}
        text_encoding.check(request.metas)
        components = self._components(request.message.model)
        components.check("text_encoder")
        check_dtype(components.dtype, self.device)
        ids, lengths = (request.tensors[name].to(self.device) for name in ("ids", "lengths"))
        class_name, config = (
            components.checkpoint.components["text_encoder"],
            components.checkpoint.config("text_encoder"),
        )
        texts, tokens = ids.shape
        work = text_bytes(class_name, config, texts=texts, tokens=tokens, itemsize=components.dtype.itemsize)
        with request.loading(components, "text_encoder"):
            encoder = components.text_encoder(request.message.adapters, request.message.overlay, work)
        with counted(encoder, "encoding text"):
            return {"embeds": text_encoding.encode(encoder, ids, lengths, layer=request.message.layer).cpu()}

    def _autoencode(self, request: ActiveRequest[Decode] | ActiveRequest[Encode]) -> Tensors:
        components = self._components(request.message.model)
        coding = Autoencoding(request, components, bfloat16=self._bfloat16, speeds=self._speeds)
        return coding.run(self._meshes, self.device)

    def _read_weights(self, request: ActiveRequest[ReadWeights]) -> Tensors:
        if request.tensors is None:
            return {}
        message, components = request.message, self._components(request.message.model)
        shapes = read_shapes(request.tensors, message.component, components.checkpoint)
        with PROGRESS.phase(LOADING):
            weights = list(read_original(components.checkpoint, message.component, shapes, message.names))
        return {str(i): weight for i, weight in enumerate(weights)} | {"dtype": torch.empty(0, dtype=components.dtype)}

    def _unload(self, request: ActiveRequest[Unload]) -> Tensors:
        if request.message.only_cache:
            self._memory.free_unused_weights()
        else:
            self._runs.clear()
            self._models.pop(_key(request.message.model), None)
            self._agreements.forget_layouts(request.message.model.identity)
            if self.elsewhere:
                self.elsewhere.forget(request.message.model)
        free(self.device)
        return {}

    def _try(self, request: ActiveRequest[Trial]) -> Tensors:
        own = self.trials.get(request.message.name)
        if own is not None:
            return own(request.message, request.tensors or {}, self._agreements.world, self.device)
        return trials.run(request.message, self._agreements.world, self.device)

    def _parts(self) -> list[Parts]:
        return [components.parts for components in self._models.values()]

    def _meshes_in_use(self) -> list[RankMesh]:
        return [mesh for components in self._models.values() for mesh in components.transformers.meshes()]

    def _components(self, model: ModelSpec) -> ComponentCache:
        """The model's components, none of them loaded if the model is new.

        The dtype ``auto`` and the dtype that it resolves to share one cache.
        """
        key = _key(model)
        if key not in self._models:
            self._forget_replaced(model)
            checkpoint = open_checkpoint(model.path)
            dtype = resolve_dtype(checkpoint, model.dtype, self.device, bfloat16=self._bfloat16)
            loaded = [cache for (path, _, _), cache in self._models.items() if path == model.path]
            same = [cache for cache in loaded if cache.dtype == dtype]
            self._models[key] = same[0] if same else ComponentCache(checkpoint, dtype, self._memory)
        return self._models[key]

    def _forget_replaced(self, model: ModelSpec) -> None:
        """Free what was loaded from older files under the same path."""
        for key in [key for key in self._models if key[0] == model.path and key[1] != model.stamp]:
            self._runs.clear()
            del self._models[key]
            free(self.device)

    def _count_forward(self) -> None:
        self.steps += 1


def _key(model: ModelSpec) -> _Key:
    return model.path, model.stamp, model.dtype


_HANDLERS: dict[type[RankRequest], Callable[..., Tensors]] = {
    Forward: Engine._forward,
    Sample: Engine._sample,
    EncodeText: Engine._encode_text,
    Decode: Engine._autoencode,
    Encode: Engine._autoencode,
    ReadWeights: Engine._read_weights,
    Unload: Engine._unload,
    Trial: Engine._try,
}
