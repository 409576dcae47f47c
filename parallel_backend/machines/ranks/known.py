"""The other machines, as one rank's engine knows them."""

from ...distributed.mesh import Axis
from ...protocol.model_spec import ModelSpec
from .crossing import Crossings, HostMap
from .host_files import HostFiles


class Known(HostFiles):
    """See ``engine.elsewhere.Elsewhere``.

    Args:
        world: all ranks.
        hosts: where the ranks are.
    """

    def __init__(self, world: Axis, hosts: HostMap) -> None:
        super().__init__(world)
        self.crossings = Crossings(hosts)
        self.loop, self.forward = self.crossings.loop, self.crossings.forward

    def forget(self, model: ModelSpec) -> None:
        """Forget a model that is unloaded, by its path on this machine."""
        super().forget(model)
        self.crossings.forget(model.path)
