"""The denoiser's part of a request: check it, load what is missing, and run one forward or a whole step loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..attention import kernels
from ..attention.kernels import Kernel
from ..checkpoint.checkpoint import HIGH_NOISE
from ..denoiser.denoiser import Denoiser
from ..denoiser.experts import Experts, Load
from ..denoiser.plan import DenoisingPlan, split_names
from ..distributed.collectives import agree, refused_alike
from ..distributed.device_memory import to_cpu
from ..distributed.mesh import Axis, RankMesh
from ..distributed.mesh_cache import MeshCache
from ..errors import InvalidRequest
from ..families.registry import family_of
from ..interfaces.family import Family
from ..loading.compiled_blocks import check_compiler, compilations
from ..loading.components import ComponentCache
from ..loading.load import check_dtype
from ..loading.transformer_part import PlannedTransformer
from ..progress import LOADING, PROGRESS
from ..protocol.messages import Forward, Progress, Sample
from ..protocol.model_spec import Adapter
from ..step_loop.pipefusion import PipeFusion
from ..step_loop.sample_loop import SampleLoop
from ..step_loop.sampling_context import SamplingContext
from .agreements import Agreements, KernelKey
from .automatic_layout import fit
from .cached_run import CachedRun, Shards
from .elsewhere import Elsewhere
from .kept_tensors import KeptTensors
from .planned import Planner, by_planner
from .request import ActiveRequest, Tensors, measured
from .shared_tensors import share_changing, share_constant, share_step
from .tensor_values import Tables, first_not_finite, first_outside
from .validation import check_forward, check_sample
from .working_memory import forward_bytes


class Denoising:
    """A ``Forward`` or ``Sample`` request on this rank, and the ``Forward`` requests that repeat it.

    Args:
        kept: tensors of earlier requests.
        elsewhere: the other machines; None if there are none.
        on_forward: called once for each forward of a transformer.
        planner: see ``Engine``.
    """

    def __init__(
        self,
        request: ActiveRequest[Forward] | ActiveRequest[Sample],
        components: ComponentCache,
        meshes: MeshCache,
        agreements: Agreements,
        kept: KeptTensors,
        elsewhere: Elsewhere | None,
        on_forward: Callable[[], None],
        planner: Planner | None = None,
    ) -> None:
        self.request, self.components, self.meshes, self.agreements = request, components, meshes, agreements
        self.kept, self.elsewhere, self.on_forward, self.planner = kept, elsewhere, on_forward, planner
        self._denoiser: Denoiser | None = None
        self._constant: Tensors = {}
        self._names: list[dict[str, str]] = []
        self._next: Tensors | None = None
        self._stays = False
        message = request.message
        self._cached = CachedRun(message.cache) if isinstance(message, Forward) and message.cache else None

    def forward(self) -> Tensors:
        """Run a ``Forward``: the prediction of each branch on rank 0, an empty dict on other ranks."""
        message, metas = self.request.message, self.request.metas
        assert isinstance(message, Forward)
        self._prepare(check_forward(message, metas, self.components.checkpoint, self.agreements.world.size))
        return self._predictions()

    def fits(self, request: ActiveRequest[Forward]) -> bool:
        """Whether a request that repeats this one needs no other checks than those of ``repeat``, by its timesteps."""
        return self._fits(request.tensors or {})

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._denoiser is None or not self._denoiser.experts.needs_both(tensors)

    def repeat(self, request: ActiveRequest[Forward]) -> Tensors:
        """Run a ``Forward`` that differs in latent and timestep alone. Its tensors are finite."""
        self.request = request
        if self._denoiser is not None:
            self._denoiser.experts.forget()
        for meta in request.metas:
            if meta.name in self._constant:  # others may have taken its place since
                self.kept.add(meta.digest, self._constant[meta.name])
        return self._predictions()

    def begin_step(self, tensors: Tensors | None, world: Axis) -> bool:
        """Let all ranks know from rank 0 whether there is a next step. Collective over the world.

        On the CPU they get its tensors with that. Of a GPU's tensors the host could not read it without waiting for
        them.

        Args:
            tensors: those that change; None if rank 0 has no further step. Other ranks give None. What a step cannot
                take is a request of its own.
            world: all ranks.

        Returns:
            Whether there is a step, on all ranks alike.
        """
        takes = tensors is not None and self._fits(tensors) and first_not_finite(tensors) < 0
        whole = {**(self.request.tensors or {}), **(tensors or {})} if takes else None
        self.request = replace(self.request, tensors=whole)
        mesh = self._denoiser.mesh if self._denoiser else None
        if mesh and mesh.all_ranks.size == world.size and self.components.device.type == "cpu":
            self._next = share_step(self.request.metas, whole, self._constant, mesh.all_ranks)
            return self._next is not None
        return bool(agree(int(whole is not None), world))

    def step(self) -> Tensors:
        """Run the step that has begun."""
        shared, self._next = self._next, None
        return self._predictions(shared)

    def keep(self) -> None:
        """Stay as it is at the end of its ``with`` block, until ``release``."""
        self._stays = True

    def release(self) -> None:
        """Refer to no weights, mesh and tensors any more."""
        self._denoiser, self._cached, self._constant = None, None, {}

    def __enter__(self) -> "Denoising":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stays:
            self.release()

    def _predictions(self, shared: Tensors | None = None) -> Tensors:
        denoiser = self._denoiser
        if denoiser is None:
            return {}
        compute = partial(self._computed, denoiser, shared)
        if self._cached:
            return self._cached.answer(self.request.tensors, denoiser, compute)
        return compute(denoiser.shards) or {}

    def _computed(self, denoiser: Denoiser, shared: Tensors | None, shards: Shards) -> Tensors | None:
        message = self.request.message
        assert isinstance(message, Forward)
        shared = self._share(self.request.tensors, denoiser.mesh) if shared is None else shared
        local = {
            i: denoiser.own(i, {argument: shared[name] for argument, name in self._names[i].items()})
            for i in denoiser.branches
        }
        denoiser.load(local)
        with self._computing("denoising"):
            noted = self._noted_forward(denoiser)
            with measured(message, denoiser.mesh.all_ranks, self.components.device) as measurement, noted:
                found = shards(local)
                predictions = None if found is None else denoiser.gather(found)
            if predictions is None:
                return None
            results = {str(i): to_cpu(prediction) for i, prediction in predictions.items()}
        return results | (measurement.of_all_ranks() if measurement else {})

    def sample(self) -> Tensors:
        """Run a ``Sample``: the last latent on rank 0, an empty dict on other ranks."""
        message, metas = self.request.message, self.request.metas
        assert isinstance(message, Sample)
        self._prepare(check_sample(message, metas, self.components.checkpoint, self.agreements.world.size))
        denoiser = self._denoiser
        if denoiser is None:
            return {}
        setting = SamplingContext(denoiser, message, self._share(self.request.tensors, denoiser.mesh))
        if message.measure:
            setting.load()
        loop_class = PipeFusion if denoiser.plan.layout.pipe > 1 else SampleLoop
        with (
            self._computing("sampling"),
            measured(message, denoiser.mesh.all_ranks, self.components.device) as measurement,
        ):
            PROGRESS.step(message.first_step, len(setting.sigmas) - 1)
            with self._noted_loop(denoiser) as step_done:
                report = partial(self._report, step_done)
                loop = loop_class(setting, report=report, cancelled=self.request.cancelled)
                results = {name: tensor.cpu() for name, tensor in loop.run().items()}
        return results | (measurement.of_all_ranks() if measurement else {})

    def _prepare(self, plan: DenoisingPlan) -> None:
        """Build the denoiser and share the tensors that have digests; not on ranks that the layout does not use.

        The steps below are collective. All ranks of the mesh run them in this order:

        1. agree on a layout that fits, if the request names none (all ranks of the world, used by the layout or not)
        2. make or find the mesh (all ranks of the world)
        3. agree that every rank's device has the dtype, the attention kernel and, if blocks are compiled, a compiler
        4. agree which ranks hold their part of sharded weights
        5. agree that the tensors can be used
        6. agree that weights and tensors fit on every device
        7. broadcast the tensors that a rank lacks; those without a digest follow

        Every error of the request is refused before step 7, on all ranks alike, so no rank waits for another. Checks
        that need no other rank (the components' files) come first. Weights load afterwards, when the denoiser first
        needs them.
        """
        for name in self.components.transformers.names or [HIGH_NOISE]:
            self.components.check(name)
        if self.request.message.model.layout is None:
            message = self.request.message
            plan = by_planner(self.planner, plan, self.request, self.components, self.agreements.world) or fit(
                plan, self.components, message.model, self.agreements, adapt=message.adapt
            )
        mesh = self.meshes.get(plan.layout.cut)
        if mesh is None:
            return
        plan = replace(plan, layout=replace(plan.layout, balance=mesh.layout.balance))  # it may have been measured
        kernel = self._kernel(plan, mesh)
        self.components.transformers.agree(mesh)
        plans: dict[str, PlannedTransformer] = {}
        experts = Experts(self.components.checkpoint, self._loader(mesh, plans), plan.adapters[0])
        self._check_tensors(mesh, experts)
        plans |= self._plan_loads(mesh, plan)
        request, device = self.request, self.components.device
        self._constant = share_constant(request.metas, request.tensors, self.kept, mesh.all_ranks, device)
        self._names, _ = split_names({meta.name: meta.name for meta in request.metas}, plan.branches)
        self._denoiser = Denoiser(experts, mesh, plan, kernel, self.on_forward, self.agreements.trials_of(mesh))

    def _share(self, tensors: Mapping[str, Tensor] | None, mesh: RankMesh) -> Tensors:
        """Return all tensors of the request, or of a step, on every rank."""
        return share_changing(self.request.metas, tensors, self._constant, mesh.all_ranks, self.components.device)

    def _check_tensors(self, mesh: RankMesh, experts: Experts) -> None:
        """Refuse tensors that cannot be used, on all ranks alike."""
        self.request.check_finite(mesh.all_ranks)
        self._check_rows(mesh)
        if experts.switch and agree(int(experts.needs_both(self.request.tensors or {})), mesh.all_ranks):
            raise InvalidRequest(
                "the timesteps of one call need both transformers of the model: give the two sides of the boundary "
                "in two calls"
            )

    @contextmanager
    def _computing(self, phase: str) -> Iterator[None]:
        """Compute in a phase, and report when blocks are compiled."""
        said = compilations(self._report_compilation) if self._compiled else nullcontext()
        with PROGRESS.phase(phase), said:
            yield

    def _report_compilation(self, done: bool) -> None:
        self.request.report(Progress(phase="compiling", value=int(done), total=1), {})

    @property
    def _compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.request.message.model.compile == "blocks"

    def _noted_forward(self, denoiser: Denoiser) -> AbstractContextManager[None]:
        if denoiser.mesh.all_ranks.index or self.elsewhere is None:
            return nullcontext()
        model = self.request.message.model
        return self.elsewhere.forward(model.path, denoiser.plan.layout, chosen=model.layout is None)

    def _noted_loop(self, denoiser: Denoiser) -> AbstractContextManager[Callable[[], str]]:
        if self.elsewhere is None:
            return nullcontext(str)  # which returns ""
        return self.elsewhere.loop(denoiser.plan.layout, chosen=self.request.message.model.layout is None)

    def _report(self, step_done: Callable[[], str], progress: Progress, extra: Mapping[str, Tensor]) -> None:
        """Report progress, streaming of blocks, ranks with less than a share, and notes about other machines."""
        assert self._denoiser
        notes = (self.components.transformers.note, self._denoiser.plan.split.note, step_done())
        self.request.report(replace(progress, note="; ".join(filter(None, notes))), extra)

    def _kernel(self, plan: DenoisingPlan, mesh: RankMesh) -> Kernel:
        """Return the attention kernel. The ranks of a mesh agree on it once: devices and weights' dtype do not change.

        Raises:
            InvalidRequest: a rank's device lacks the kernel or the dtype, or its machine a compiler.
        """
        attention, components, agreed = self.request.message.model.attention, self.components, self.agreements.kernels
        head_sizes = frozenset(site.head_dim for site in plan.geometry.sites)
        key = KernelKey(
            mesh=mesh.serial,
            attention=attention,
            dtype=components.dtype,
            head_sizes=head_sizes,
            compiled=self._compiled,
        )
        if key not in agreed:
            with refused_alike(mesh.all_ranks):
                check_dtype(components.dtype, components.device)
                kernel = kernels.choose(attention, components.device, components.dtype, set(head_sizes))
                if key.compiled:
                    check_compiler(components.device)
            agreed[key] = kernel
        return agreed[key]

    def _plan_loads(self, mesh: RankMesh, plan: DenoisingPlan) -> dict[str, PlannedTransformer]:
        """Plan the weights that this rank lacks. Refuse the request, on all ranks alike, if a device has no room."""
        transformers = self.components.transformers
        if transformers.missing(mesh):
            self.request.report_loading()  # the first plan imports diffusers, which takes seconds
        class_name = self.components.checkpoint.components[HIGH_NOISE]
        work = forward_bytes(class_name, plan, mesh.all_ranks.index, self.components.dtype.itemsize)
        with PROGRESS.phase(LOADING):
            return transformers.prepare(mesh, work, stream=self.request.message.adapt)

    def _loader(self, mesh: RankMesh, plans: dict[str, PlannedTransformer]) -> Load:
        transformers = self.components.transformers

        def load(component: str, adapters: Sequence[Adapter]) -> Family:
            self.components.layout = mesh.layout
            with self.request.loading(self.components, component):
                overlay = self.request.message.overlay
                return transformers.get(mesh, component, plans, adapters, overlay, compiled=self._compiled)

        return load

    def _check_rows(self, mesh: RankMesh) -> None:
        """Refuse indices outside the tables that they are for, on all ranks alike."""
        checkpoint, request = self.components.checkpoint, self.request
        family = family_of(checkpoint.components["transformer"])
        known = Tables(rows=family.embedding_sizes(checkpoint.config("transformer")), levels=family.levels)
        sizes = known.sizes({meta.name: meta.shape for meta in request.metas})
        if not sizes:
            return
        index, value = (agree(number, mesh.all_ranks) for number in first_outside(request.tensors or {}, sizes))
        if index >= 0:
            raise InvalidRequest(known.refusal(request.metas[index].name, value, sizes))
