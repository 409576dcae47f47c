"""The stand-in for ComfyUI's transformer: it has the names and shapes of the weights, and forwards the calls."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.patcher_extension
import comfy.utils
import torch
from torch import Tensor

from ...parallel_backend.protocol.messages import Forward, ModelSpec, Overlay
from ..backend.connection import Handle
from ..bridges.bridge import Bridge
from ..bridges.refusals import check_latent, check_options, check_unused
from .record_replay import BranchCall, CallRecorder, CallReplayer
from .weight_changes import WeightChanges

DTYPES: dict[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype of the latents and text that ComfyUI passes. ``auto`` leaves the rounding to the ranks."""


class RemoteTransformer(torch.nn.Module):
    """Takes the calls that ComfyUI makes to its own transformer of the family.

    It has no parameters. ``state_dict`` lists meta tensors.

    Attributes:
        weight_prefix: the beginning of the weights' names in ComfyUI's MODEL.
        weights: names and shapes of ComfyUI's weights.
        changes: what is changed in the weights during the next calls.
    """

    weight_prefix = "diffusion_model."

    def __init__(self, handle: Handle, bridge: Bridge, core_config: Any) -> None:
        super().__init__()
        self.handle, self.bridge = handle, bridge
        self.dtype, self.channels = DTYPES[handle.spec.dtype], core_config.latent_format.latent_channels
        self.weights = bridge.weights(core_config.unet_config)
        self.changes = WeightChanges()
        self._signature = inspect.signature(bridge.native_class.forward)
        self._interceptor: CallRecorder | CallReplayer | None = None
        for name, value in bridge.attributes(self.weights.tensors).items():
            setattr(self, name, value)

    def forward(self, x: Tensor, timestep: Tensor, **call_args: Any) -> Tensor:
        """Return the prediction for ``x`` ``[B, C, (T,) H, W]``, through other nodes' DIFFUSION_MODEL wrappers.

        The wrappers get the arguments in the order of the native forward.

        Raises:
            InvalidRequest: an argument that the family's bridge does not support.
        """
        bound = self._signature.bind_partial(self, x, timestep, **call_args)
        bound.apply_defaults()
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        wrappers = comfy.patcher_extension.get_all_wrappers(kind, call_args.get("transformer_options") or {})
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        out: Tensor = executor.execute(*bound.args[1:], **bound.kwargs)
        return out

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._signature.bind_partial(self, *args, **kwargs)
        _, x_name, timestep_name, *_ = parameters = self._signature.parameters
        catch_all = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        named = {name: value for name, value in bound.arguments.items() if name not in ("self", *catch_all)}
        call_args = {name: value for name, value in (named | bound.kwargs).items() if value is not None}
        x, timestep = call_args.pop(x_name), call_args.pop(timestep_name)
        options = call_args.pop("transformer_options", {})
        inputs = self.bridge.inputs(x, timestep, call_args)
        check_unused(call_args)
        return self.predict(inputs, latent="hidden_states", transformer_options=options)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **_: Any) -> Any:
        """Return meta tensors under ComfyUI's names, from which its LoRA nodes learn what they would change."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self.weights.tensors.items()})
        return destination

    @property
    def components(self) -> tuple[str, ...]:
        """Diffusers' names of the model's transformers."""
        return tuple(name for name in self.handle.checkpoint.components if name.startswith("transformer"))

    @property
    def intercepting(self) -> bool:
        """Whether calls are being recorded or replayed."""
        return self._interceptor is not None

    @contextmanager
    def recording(self) -> Iterator[list[BranchCall]]:
        """Record the calls inside the ``with`` block and answer them with zeros. Yields the list of recorded calls."""
        recorder = CallRecorder()
        with self._intercept(recorder):
            yield recorder.calls

    @contextmanager
    def replaying(self, recorded: list[BranchCall]) -> Iterator[None]:
        """Answer each call inside the ``with`` block with its prediction from a single request for all ``recorded``."""
        with self._intercept(CallReplayer(recorded)):
            yield

    @contextmanager
    def _intercept(self, interceptor: CallRecorder | CallReplayer) -> Iterator[None]:
        before, self._interceptor = self._interceptor, interceptor
        try:
            yield
        finally:
            self._interceptor = before

    def predict(self, inputs: Mapping[str, Tensor], *, latent: str, transformer_options: Mapping[str, Any]) -> Tensor:
        """Return the prediction for a call in which ComfyUI may have batched several branches along dim 0.

        Args:
            inputs: the family's inputs by name, batch first.
            latent: the name of the input that has the prediction's shape.
            transformer_options: ComfyUI's, with ``cond_or_uncond``: the branch of each chunk of the batch.

        Raises:
            InvalidRequest: a node needs the layers in this process.
        """
        check_options(transformer_options)
        x = inputs[latent]
        inputs = {name: comfy.utils.repeat_to_batch_size(tensor, len(x)) for name, tensor in inputs.items()}
        indices = list(transformer_options.get("cond_or_uncond") or [0])
        chunks = {name: tensor.chunk(len(indices)) for name, tensor in inputs.items()}
        calls = [
            BranchCall(
                index=index,
                inputs={name: chunk[i] for name, chunk in chunks.items()},
                latent=latent,
                changes=self.changes,
            )
            for i, index in enumerate(indices)
        ]
        answers = self._interceptor.answer(calls, self.request) if self._interceptor else self.request(calls)
        return torch.cat([answer.to(device=x.device) for answer in answers])

    def request(self, calls: list[BranchCall]) -> list[Tensor]:
        """Return the predictions of all calls, from one request for those whose weights have the same overlay.

        In a step with one branch the layout's ``cfg`` axis shrinks to one rank: ComfyUI skips the negative prompt
        outside its time range.

        Raises:
            InvalidRequest: a latent is nested, has the wrong number of channels, or is not finite.
        """
        for call in calls:
            check_latent(call.inputs[call.latent], self.channels)
        by_overlay: dict[Overlay | None, list[int]] = {}
        for i, call in enumerate(calls):
            by_overlay.setdefault(call.changes.overlay, []).append(i)
        answers: dict[int, Tensor] = {}
        for overlay, places in by_overlay.items():
            answers |= zip(places, self._request([calls[i] for i in places], overlay), strict=True)
        return [answers[i] for i in range(len(calls))]

    def _request(self, calls: list[BranchCall], overlay: Overlay | None) -> list[Tensor]:
        tensors = {f"{i}.{name}": tensor for i, call in enumerate(calls) for name, tensor in call.inputs.items()}
        message = Forward(
            model=self._spec(len(calls)),
            branches=len(calls),
            adapters=tuple(call.changes.adapters for call in calls),
            overlay=overlay,
        )
        answers = self.handle.call(message, tensors)
        return [answers[str(i)] for i in range(len(calls))]

    def _spec(self, branches: int) -> ModelSpec:
        spec, layout = self.handle.spec, self.handle.spec.layout
        if layout is None or layout.cfg <= branches:
            return spec
        return replace(spec, layout=replace(layout, cfg=branches))
