"""The denoiser's part of a request: check it, load what is missing, and run forwards for a loop that runs elsewhere."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..checkpoint.checkpoint import HIGH_NOISE
from ..denoiser.denoiser import Denoiser
from ..denoiser.plan import DenoisingPlan
from ..distributed.collectives import agree, refused_everywhere
from ..distributed.device_memory import to_cpu
from ..distributed.mesh import Axis
from ..distributed.mesh_cache import MeshCache
from ..errors import InvalidRequest, NoRoom
from ..layout.modes import AUTO
from ..layout.parallel_layout import ParallelLayout
from ..loading.compiled_blocks import compilations
from ..loading.components import ComponentCache
from ..progress import CLIENT, PROGRESS
from ..protocol.messages import Forward, Progress, Sample
from .agreements import Agreements
from .arranging import Arranged, Arranging
from .automatic_layout import fit
from .cached_run import CachedRun, Shards
from .elsewhere import Elsewhere
from .kept_tensors import KeptTensors
from .layout_trial import LayoutTrial
from .planned import Planner, by_planner
from .request import ActiveRequest, Tensors, measured
from .shared_tensors import share_changing, share_step
from .tensor_values import first_not_finite
from .validation import check_forward

log = logging.getLogger(__name__)


class Denoising:
    """A ``Forward`` request on this rank, and those that repeat it. ``Sampling`` is a ``Sample`` request.

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
        self.request, self.components, self.agreements = request, components, agreements
        self.kept, self.elsewhere, self.planner = kept, elsewhere, planner
        self._arranging = Arranging(lambda: self.request, components, meshes, agreements, kept, on_forward)
        self._arranged: Arranged | None = None
        self._plan: DenoisingPlan | None = None
        self._trial: LayoutTrial | None = None
        self._next: Tensors | None = None
        self._stays = False
        self._holds_until = math.inf
        message = request.message
        self._cached = CachedRun(message.cache) if isinstance(message, Forward) and message.cache else None

    def forward(self) -> Tensors:
        """Run a ``Forward``: the prediction of each branch on rank 0, an empty dict on other ranks."""
        message, metas = self.request.message, self.request.metas
        assert isinstance(message, Forward)
        self._prepare(check_forward(message, metas, self.components.checkpoint, self.agreements.world.size))
        return self._predictions()

    @property
    def constant(self) -> Collection[Tensor]:
        """The tensors that its steps have in common, on this rank's device."""
        return self._arranged.constant.values() if self._arranged else ()

    def fits(self, request: ActiveRequest[Forward]) -> bool:
        """Whether a request that repeats this one needs no other checks than those of ``repeat``, by its timesteps."""
        return self._fits(request.tensors or {})

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._arranged is None or not self._arranged.denoiser.experts.needs_both(tensors)

    def outdated(self, request: ActiveRequest[Forward]) -> bool:
        """Whether a request that repeats this one begins a prompt for which the layout should be planned again."""
        old = self._trial is None and time.monotonic() > self._holds_until
        return old and request.message.origin != self.request.message.origin

    def repeat(self, request: ActiveRequest[Forward]) -> Tensors:
        """Run a ``Forward`` that differs in latent and timestep alone. Its tensors are finite."""
        self.request = request
        self._try_layout()
        if self._arranged is not None:
            self._arranged.denoiser.experts.forget()
            for meta in request.metas:
                if meta.name in self._arranged.constant:  # others may have taken its place since
                    self.kept.add(meta.digest, self._arranged.constant[meta.name])
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
        if self._trial and self._trial.due:
            if not agree(int(tensors is not None), world):
                return False
            self._try_layout()
        takes = tensors is not None and self._fits(tensors) and first_not_finite(tensors) < 0
        whole = {**(self.request.tensors or {}), **(tensors or {})} if takes else None
        self.request = replace(self.request, tensors=whole)
        arranged, on_cpu = self._arranged, self.components.device.type == "cpu"
        all_ranks = arranged is not None and arranged.denoiser.mesh.all_ranks.size == world.size
        if arranged and all_ranks and on_cpu and not self._trial:  # which times all of a step
            self._next = share_step(self.request.metas, whole, arranged.constant, arranged.denoiser.mesh.all_ranks)
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
        self._arranged, self._cached = None, None

    def __enter__(self) -> "Denoising":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stays:
            self.release()

    def _predictions(self, shared: Tensors | None = None) -> Tensors:
        with self._trial.timed() if self._trial else nullcontext():
            arranged = self._arranged
            if arranged is None:
                return {}
            compute = partial(self._computed, arranged, shared)
            if self._cached:
                return self._cached.answer(self.request.tensors, arranged.denoiser, compute)
            return compute(arranged.denoiser.shards) or {}

    def _computed(self, arranged: Arranged, shared: Tensors | None, shards: Shards) -> Tensors | None:
        message, denoiser = self.request.message, arranged.denoiser
        assert isinstance(message, Forward)
        shared = self._share(arranged) if shared is None else shared
        local = {
            i: denoiser.own(i, {argument: shared[name] for argument, name in arranged.names[i].items()})
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

    def _prepare(self, plan: DenoisingPlan) -> None:
        """Agree on a layout, if the request names none, and arrange the request in it. Collective over the world.

        Checks that need no other rank (the components' files) come first.
        """
        for name in self.components.transformers.names or [HIGH_NOISE]:
            self.components.check(name)
        self._plan = self._chosen(plan) if self.request.message.model.layout is None else plan
        self._arranged = self._in_layout(self._plan)
        self._try_layout()

    def _in_layout(self, plan: DenoisingPlan, *, stream: bool = True) -> Arranged | None:
        """See ``Arranging.in_layout``. A refusal reaches ranks without a part, too, which would go on alone."""
        with refused_everywhere(self.agreements.world):
            return self._arranging.in_layout(plan, stream=stream)

    def _chosen(self, plan: DenoisingPlan) -> DenoisingPlan:
        """Return the plan of a request that names no layout. Collective over the world."""
        message, world = self.request.message, self.agreements.world
        planned = by_planner(self.planner, plan, self.request, self.components, world)
        if planned is None or planned.layout is None:
            return fit(plan, self.components, message.model, self.agreements, adapt=message.adapt)
        self._holds_until = time.monotonic() + planned.holds
        if message.model.mode == AUTO:
            return self._fitted(plan, planned.layout)
        if planned.trial and isinstance(message, Forward) and not message.cache:  # which computes all steps
            self._trial = planned.trial()
        return replace(plan, layout=planned.layout)

    def _fitted(self, plan: DenoisingPlan, roomy: ParallelLayout) -> DenoisingPlan:
        """Return the plan in a layout of whole weights, or in one that fits, and say so then."""
        message = self.request.message
        fitted = fit(plan, self.components, message.model, self.agreements, adapt=message.adapt, roomy=roomy)
        if fitted.layout != roomy:
            note = f'the devices have no room for "{roomy}", so the layout is "{fitted.layout}"'
            self.request.report(Progress(phase="planning", value=1, total=1, note=note), {})
        return fitted

    def _try_layout(self) -> None:
        """Go on in the layout that is tried next, or in the fastest. Collective over the world."""
        trial = self._trial
        while trial and self._plan and trial.due:
            plan = replace(self._plan, layout=trial.move(self.agreements.world))
            if not self._moves(plan) and not trial.settled:
                trial.fails()
        if trial and trial.settled:
            self._trial = None
            self.request.report(Progress(phase="planning", value=1, total=1, note=trial.reason), {})

    def _moves(self, plan: DenoisingPlan) -> bool:
        """Arrange the request in another layout, if it works there on all ranks of the world."""
        if self._plan is None or self._plan == plan:
            return True
        try:
            self._arranged = self._in_layout(plan, stream=False)
        except (InvalidRequest, NoRoom) as refusal:
            log.info("layout %s is not tried: %s", plan.layout, refusal)
            self._arranged = self._in_layout(self._plan)  # whose groups may have made room
            return False
        self._plan = plan
        return True

    def _share(self, arranged: Arranged) -> Tensors:
        """Return all tensors of the request, or of a step, on every rank."""
        request, ranks = self.request, arranged.denoiser.mesh.all_ranks
        return share_changing(request.metas, request.tensors, arranged.constant, ranks, self.components.device)

    @contextmanager
    def _computing(self, phase: str) -> Iterator[None]:
        """Compute in a phase, and report when blocks are compiled."""
        compiled = self.request.message.model.compile == "blocks"
        said = compilations(self._report_compilation) if compiled else nullcontext()
        with PROGRESS.phase(phase), said:
            yield

    def _report_compilation(self, done: bool) -> None:
        self.request.report(Progress(phase="compiling", value=int(done), total=1), {})

    def _noted_forward(self, denoiser: Denoiser) -> AbstractContextManager[None]:
        if denoiser.mesh.all_ranks.index or self.elsewhere is None:
            return nullcontext()
        model = self.request.message.model
        return self.elsewhere.forward(model.path, denoiser.plan.layout, chosen=model.layout is None)


def further_steps(run: Denoising, request: ActiveRequest[Forward], results: Tensors, world: Axis) -> Tensors:
    """Answer with ``results``, and run the steps that the client then sends. Collective over the world.

    Returns:
        The newest results.
    """
    while request.message.steps:
        with PROGRESS.phase(CLIENT):
            tensors = request.next_step(results)
        with PROGRESS.phase(CLIENT) if world.index else nullcontext():  # the others wait for rank 0's client
            begun = run.begin_step(tensors, world)
        if not begun:
            break
        results = run.step()
    return results
