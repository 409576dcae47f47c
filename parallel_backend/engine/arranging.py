"""What a request needs in one layout: its mesh, kernel and weights, and the tensors that have digests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..attention import kernels
from ..attention.kernels import Kernel
from ..checkpoint.checkpoint import HIGH_NOISE
from ..denoiser.denoiser import Denoiser
from ..denoiser.experts import Experts, Load
from ..denoiser.plan import DenoisingPlan, split_names
from ..distributed.collectives import agree, refused_alike
from ..distributed.mesh import RankMesh
from ..distributed.mesh_cache import MeshCache
from ..errors import InvalidRequest
from ..families.registry import family_of
from ..interfaces.family import Family
from ..loading.compiled_blocks import check_compiler
from ..loading.components import ComponentCache
from ..loading.load import check_dtype
from ..loading.transformer_part import PlannedTransformer
from ..progress import LOADING, PROGRESS
from ..protocol.messages import Forward, Sample
from ..protocol.model_spec import Adapter
from .agreements import Agreements, KernelKey
from .kept_tensors import KeptTensors
from .request import ActiveRequest, Tensors
from .shared_tensors import share_constant
from .tensor_values import Tables, first_outside
from .working_memory import forward_bytes

Request = ActiveRequest[Forward] | ActiveRequest[Sample]


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """A request in a layout, on a rank that takes part.

    Attributes:
        denoiser: runs it.
        constant: its tensors that have digests, on this rank's device.
        names: of its tensors, by branch, by the names of the inputs that they are.
    """

    denoiser: Denoiser
    constant: Tensors
    names: Sequence[Mapping[str, str]]


class Arranging:
    """Arranges a request.

    Args:
        current: returns the request, or the one that repeats it now.
        kept: tensors of earlier requests.
        on_forward: called once for each forward of a transformer.
    """

    def __init__(
        self,
        current: Callable[[], Request],
        components: ComponentCache,
        meshes: MeshCache,
        agreements: Agreements,
        kept: KeptTensors,
        on_forward: Callable[[], None],
    ) -> None:
        self._current, self._components, self._meshes = current, components, meshes
        self._agreements, self._kept, self._on_forward = agreements, kept, on_forward

    def in_layout(self, plan: DenoisingPlan, *, stream: bool = True) -> Arranged | None:
        """Build the denoiser and share the tensors that have digests; None on ranks that the layout does not use.

        The steps below are collective. All ranks of the mesh run them in this order:

        1. make or find the mesh (all ranks of the world, used by the layout or not)
        2. agree that every rank's device has the dtype, the attention kernel and, if blocks are compiled, a compiler
        3. agree which ranks hold their part of sharded weights
        4. agree that the tensors can be used
        5. agree that weights and tensors fit on every device
        6. broadcast the tensors that a rank lacks; those without a digest follow

        Every error of the request is refused before step 6, on all ranks alike, so no rank waits for another. Weights
        load afterwards, when the denoiser first needs them.

        Args:
            stream: whether blocks may stream where weights have no room.
        """
        mesh = self._meshes.get(plan.layout.cut)
        if mesh is None:
            return None
        plan = replace(plan, layout=replace(plan.layout, balance=mesh.layout.balance))  # it may have been measured
        kernel = self._kernel(plan, mesh)
        self._components.transformers.agree(mesh)
        plans: dict[str, PlannedTransformer] = {}
        experts = Experts(self._components.checkpoint, self._loader(mesh, plans), plan.adapters[0])
        self._check_tensors(mesh, experts)
        plans |= self._plan_loads(mesh, plan, stream)
        request, device = self._current(), self._components.device
        names, _ = split_names({meta.name: meta.name for meta in request.metas}, plan.branches)
        return Arranged(
            denoiser=Denoiser(experts, mesh, plan, kernel, self._on_forward, self._agreements.trials_of(mesh)),
            constant=share_constant(request.metas, request.tensors, self._kept, mesh.all_ranks, device),
            names=names,
        )

    def _check_tensors(self, mesh: RankMesh, experts: Experts) -> None:
        """Refuse tensors that cannot be used, on all ranks alike."""
        self._current().check_finite(mesh.all_ranks)
        self._check_rows(mesh)
        if experts.switch and agree(int(experts.needs_both(self._current().tensors or {})), mesh.all_ranks):
            raise InvalidRequest(
                "the timesteps of one call need both transformers of the model: give the two sides of the boundary "
                "in two calls"
            )

    def _kernel(self, plan: DenoisingPlan, mesh: RankMesh) -> Kernel:
        """Return the attention kernel. The ranks of a mesh agree on it once: devices and weights' dtype do not change.

        Raises:
            InvalidRequest: a rank's device lacks the kernel or the dtype, or its machine a compiler.
        """
        attention, components, agreed = (
            self._current().message.model.attention,
            self._components,
            self._agreements.kernels,
        )
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

    @property
    def _compiled(self) -> bool:
        return self._current().message.model.compile == "blocks"

    def _plan_loads(self, mesh: RankMesh, plan: DenoisingPlan, stream: bool) -> dict[str, PlannedTransformer]:
        """Plan the weights that this rank lacks. Refuse the request, on all ranks alike, if a device has no room."""
        transformers = self._components.transformers
        if transformers.missing(mesh):
            self._current().report_loading()  # the first plan imports diffusers, which takes seconds
        class_name = self._components.checkpoint.components[HIGH_NOISE]
        work = forward_bytes(class_name, plan, mesh.all_ranks.index, self._components.dtype.itemsize)
        with PROGRESS.phase(LOADING):
            return transformers.prepare(mesh, work, stream=stream and self._current().message.adapt)

    def _loader(self, mesh: RankMesh, plans: dict[str, PlannedTransformer]) -> Load:
        transformers = self._components.transformers

        def load(component: str, adapters: Sequence[Adapter]) -> Family:
            self._components.layout = mesh.layout
            with self._current().loading(self._components, component):
                overlay = self._current().message.overlay
                return transformers.get(mesh, component, plans, adapters, overlay, compiled=self._compiled)

        return load

    def _check_rows(self, mesh: RankMesh) -> None:
        """Refuse indices outside the tables that they are for, on all ranks alike."""
        checkpoint, request = self._components.checkpoint, self._current()
        family = family_of(checkpoint.components["transformer"])
        known = Tables(rows=family.embedding_sizes(checkpoint.config("transformer")), levels=family.levels)
        sizes = known.sizes({meta.name: meta.shape for meta in request.metas})
        if not sizes:
            return
        index, value = (agree(number, mesh.all_ranks) for number in first_outside(request.tensors or {}, sizes))
        if index >= 0:
            raise InvalidRequest(known.refusal(request.metas[index].name, value, sizes))
