"""The module that stands where ComfyUI expects the transformer: it has its names and shapes, and forwards its calls."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.patcher_extension
import comfy.utils
import torch
from torch import Tensor

from ...parallel_backend.protocol.messages import Forward, ModelSpec
from ..backend.connection import Handle
from ..bridges.bridge import Bridge
from ..bridges.refusals import check_extra, check_latent, check_options
from .record_replay import Branch, Recording, Replay

DTYPES: dict[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""In which dtype latents and text are handed over; ``auto`` leaves the rounding to the ranks."""


class RemoteModel(torch.nn.Module):
    """Takes the calls that ComfyUI makes to its own transformer of the family.

    It has no parameters; ``state_dict`` lists meta tensors instead.
    """

    def __init__(self, handle: Handle, bridge: Bridge, core: Any) -> None:
        super().__init__()
        self.handle, self.bridge = handle, bridge
        self.dtype, self.channels = DTYPES[handle.spec.dtype], core.latent_format.latent_channels
        self._meta = bridge.weights(core.unet_config)
        self._signature = inspect.signature(bridge.native.forward)
        self._tape: Recording | Replay | None = None
        for name, value in bridge.attributes(self._meta).items():
            setattr(self, name, value)

    def forward(self, x: Tensor, timestep: Tensor, **given: Any) -> Tensor:
        """The prediction for ``x`` ``[B, C, (T,) H, W]``, through other nodes' DIFFUSION_MODEL wrappers.

        Those find the arguments in the order of the native forward, as they are used to.

        Raises:
            InvalidRequest: an input that the family does not carry over.
        """
        bound = self._signature.bind_partial(self, x, timestep, **given)
        bound.apply_defaults()
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        wrappers = comfy.patcher_extension.get_all_wrappers(kind, given.get("transformer_options") or {})
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        out: Tensor = executor.execute(*bound.args[1:], **bound.kwargs)
        return out

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._signature.bind_partial(self, *args, **kwargs)
        _, x_name, timestep_name, *_ = parameters = self._signature.parameters
        rest = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        given = {name: value for name, value in bound.arguments.items() if name not in ("self", *rest)} | bound.kwargs
        named = {name: value for name, value in given.items() if value is not None}
        x, timestep, options = named.pop(x_name), named.pop(timestep_name), named.pop("transformer_options", {})
        inputs = self.bridge.inputs(x, timestep, named)
        check_extra(named)
        return self.predict(inputs, latent="hidden_states", transformer_options=options)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **_: Any) -> Any:
        """Meta tensors under ComfyUI's final names, so that its LoRA nodes know what they would change."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self._meta.items()})
        return destination

    @property
    def taped(self) -> bool:
        """Whether calls are being recorded or replayed right now."""
        return self._tape is not None

    @contextmanager
    def recording(self) -> Iterator[list[Branch]]:
        """Collect the branches that are asked for inside, answering zeros."""
        tape = Recording()
        with self._taping(tape):
            yield tape.branches

    @contextmanager
    def replaying(self, recorded: list[Branch]) -> Iterator[None]:
        """Answer the calls inside from one request for all of ``recorded``."""
        with self._taping(Replay(recorded)):
            yield

    @contextmanager
    def _taping(self, tape: Recording | Replay) -> Iterator[None]:
        before, self._tape = self._tape, tape
        try:
            yield
        finally:
            self._tape = before

    def predict(self, inputs: Mapping[str, Tensor], *, latent: str, transformer_options: Mapping[str, Any]) -> Tensor:
        """The prediction for a call in which ComfyUI may have batched several branches along dim 0.

        Raises:
            InvalidRequest: something about the call cannot be done remotely.
        """
        check_options(transformer_options)
        x = inputs[latent]
        inputs = {name: comfy.utils.repeat_to_batch_size(tensor, len(x)) for name, tensor in inputs.items()}
        indices = list(transformer_options.get("cond_or_uncond") or [0])
        parts = {name: tensor.chunk(len(indices)) for name, tensor in inputs.items()}
        branches = [
            Branch(index=index, inputs={name: part[i] for name, part in parts.items()}, latent=latent)
            for i, index in enumerate(indices)
        ]
        answers = self._tape.answer(branches, self.run) if self._tape is not None else self.run(branches)
        return torch.cat([answer.to(device=x.device) for answer in answers])

    def run(self, branches: list[Branch]) -> list[Tensor]:
        """One request for all branches.

        A layout's ``cfg`` ranks sit out a step with one branch: core leaves the negative prompt out wherever its
        time range ends.

        Raises:
            InvalidRequest: a latent is unusable.
        """
        for branch in branches:
            check_latent(branch.inputs[branch.latent], self.channels)
        tensors = {f"{i}.{name}": tensor for i, branch in enumerate(branches) for name, tensor in branch.inputs.items()}
        done = self.handle.call(Forward(model=self._spec(len(branches)), branches=len(branches)), tensors)
        return [done[str(i)] for i in range(len(branches))]

    def _spec(self, branches: int) -> ModelSpec:
        spec, layout = self.handle.spec, self.handle.spec.layout
        if layout is None or layout.cfg <= branches:
            return spec
        return replace(spec, layout=replace(layout, cfg=branches))
