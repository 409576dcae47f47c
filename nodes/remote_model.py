"""The module that stands where ComfyUI expects the transformer: it has its names and shapes, and forwards its calls."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..parallel_backend.messages import Forward, ModelSpec
from .connection import Handle
from .guards import check_latent, check_options
from .tape import Branch, Recording, Replay


class RemoteModel(torch.nn.Module):
    """Base of the families' stand-ins. It has no parameters; ``state_dict`` lists meta tensors instead."""

    def __init__(self, handle: Handle, *, dtype: torch.dtype, weights: Mapping[str, Tensor], channels: int) -> None:
        super().__init__()
        self.handle, self.dtype, self.channels = handle, dtype, channels
        self._meta = dict(weights)
        self._tape: Recording | Replay | None = None

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **_: Any) -> Any:
        """Meta tensors under ComfyUI's final names, so that its LoRA nodes know what they would change."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self._meta.items()})
        return destination

    def weight(self, name: str) -> SimpleNamespace:
        """A stand-in for a layer that ComfyUI only asks for the shape of its weight."""
        return SimpleNamespace(weight=self._meta[f"{name}.weight"])

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
