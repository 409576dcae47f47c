"""The stand-in for ComfyUI's transformer: it has the names and shapes of the weights, and forwards the calls."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ...parallel_backend.protocol.messages import Forward
from ...parallel_backend.protocol.model_spec import ModelSpec, Overlay
from ...parallel_backend.protocol.packing import unpack
from ..backend.connection import Handle
from ..bridges.bridge import Bridge, LayersHere
from ..bridges.refusals import (
    TRANSFORMER,
    check_changed_layer,
    check_options,
    check_unused,
    layers_unavailable,
)
from ..bridges.skipped_layers import skipped_blocks
from .layer_path import Layers
from .looks_native import LooksNative
from .overlays import stored_weights
from .record_replay import BranchCall, CallCounter, CallRecorder, CallReplayer, chunks, requests_of
from .stand_in_layers import StandInLayers, stand_in_weights
from .step_cache import CachedSampling
from .weight_changes import WeightChanges

DTYPES: dict[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype of the latents and text that ComfyUI passes. ``auto`` leaves the rounding to the ranks."""

CONTROLNET_TEXT = "crossattn_controlnet"
"""A prompt that ComfyUI passes to every transformer, and only a ControlNet uses."""

Interceptor = CallRecorder | CallReplayer | CallCounter
Intercepting = TypeVar("Intercepting", bound=Interceptor)

_signature = cache(inspect.signature)
"""By function. A pure memo, not state: every call of a model asks for it."""


class RemoteTransformer(LooksNative, nn.Module):
    """Takes the calls that ComfyUI makes to its own transformer of the family.

    It has no parameters. ``state_dict`` lists meta tensors. ``named_modules`` and ``named_children`` list ComfyUI's
    layers, without weights, so that a node that changes layers finds some; ``changed_layer`` says whether one did.

    Attributes:
        weight_prefix: the beginning of the weights' names in ComfyUI's MODEL.
        weights: names and shapes of ComfyUI's weights.
        changes: what is changed in the weights during the next calls.
        cached: the step cache of the sampling; None if it has none.
        one_call: whether ComfyUI puts all branches of a step into one call. None before a sampling has shown it.
    """

    weight_prefix = "diffusion_model."

    def __init__(self, handle: Handle, bridge: Bridge, core_config: Any) -> None:
        super().__init__()
        self.handle, self.bridge = handle, bridge
        module = bridge.module(core_config.unet_config)
        self.weights = bridge.weights(module)
        self.changes = WeightChanges()
        self._stand_ins = StandInLayers(nn.Module() if module is None else module)
        self._paths = Layers(weights=stand_in_weights(self.weights.tensors), classes=self._stand_ins.classes)
        self._interceptor: Interceptor | None = None
        self._checked: set[bool] = set()
        self.one_call: bool | None = None
        self.cached: CachedSampling | None = None
        for name, value in (self._stand_ins.numbers | bridge.attributes()).items():
            setattr(self, name, value)
            if isinstance(value, LayersHere):
                value.attach(lambda: self.changes.here, self._decoded)
        self.dtype = DTYPES[handle.spec.dtype]
        self._own = {*vars(self), "forward"}

    def __getattr__(self, name: str) -> Any:
        """Return a layer's path. Refuse the rest with an ``AttributeError`` that says what to do."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = vars(self)["_paths"].at(name) if "_paths" in vars(self) else None
            if found is None:
                self.note_asked(name)
                raise layers_unavailable(f"a node uses {TRANSFORMER}.{name}") from None
            return found

    def __deepcopy__(self, memo: Any) -> "RemoteTransformer":
        """Return this module: the weights are in the ranks, and are not copied."""
        return self

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """The layers after this module are ``StandInLayers``."""
        yield from super().named_modules(memo, prefix, remove_duplicate)
        layers = self._stand_ins.module.named_modules(memo, prefix, remove_duplicate)
        yield from ((name, layer) for name, layer in layers if layer is not self._stand_ins.module)

    def named_children(self) -> Any:
        yield from self._stand_ins.module.named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """Return this module for an empty name, or one of ``StandInLayers``.

        Raises:
            InvalidRequest: there is no such layer. It is an ``AttributeError``, too.
        """
        return self._stand_in(target, nn.Module) if target else self

    def get_parameter(self, target: str) -> Any:
        """Return a weight of ``StandInLayers``. See ``get_submodule``."""
        return self._stand_in(target, Tensor)

    get_buffer = get_parameter

    def _stand_in(self, target: str, kind: type) -> Any:
        found: Any = self._stand_ins.module
        for name in target.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, kind):
            raise layers_unavailable(f"a node uses {TRANSFORMER}.{target}")
        return found

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse weights: they come from the checkpoint only.

        Raises:
            InvalidRequest: always.
        """
        raise layers_unavailable("a node loads weights into the model")

    def begin_sampling(self) -> None:
        """Let the next calls prove that no node has wrapped layers since sampling began, and how many a step has."""
        self._checked, self.one_call = set(), None

    def changed_layer(self) -> tuple[str, str] | None:
        """Return the name of a layer or method of the native transformer that a node wrapped or set, and the node."""
        added = vars(self).keys() | self._modules.keys() - self._own
        native = [name for name in sorted(added - self._own) if hasattr(self.bridge.native_class, name)]
        name = next(iter([*self._modules, *native]), None)
        if name is not None:
            return name, self.set_by.get(name, "")
        changed = self._stand_ins.changed()
        return (changed, "") if changed else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, or, while calls are recorded, what is left of it without other nodes' code."""
        if not self.recording_now:
            return super().__call__(*args, **kwargs)
        options = kwargs.get("transformer_options") or {}
        bare = {name: value for name, value in options.items() if name != "wrappers"}
        return RemoteTransformer.forward(self, *args, **(kwargs | {"transformer_options": bare}))

    def forward(self, x: Any, timestep: Any, **call_args: Any) -> Any:
        """Return the prediction for ``x`` ``[B, C, (T,) H, W]``, or of a model of several latents a list for a list.

        ComfyUI's own ``forward`` of the family runs, which calls ``_forward`` through other nodes' DIFFUSION_MODEL
        wrappers. Where a family's ``forward`` knows no wrappers, ComfyUI alone ignores them, too.

        Raises:
            InvalidRequest: an argument that the family's bridge does not support.
        """
        native_class = self.bridge.native_class
        if not hasattr(native_class, "_forward"):
            return self._forward(x, timestep, **call_args)
        _, _, _, *others = _signature(native_class.forward).parameters.values()
        named = [each for each in others if each.kind is each.POSITIONAL_OR_KEYWORD]
        missing = {each.name: None for each in named if each.default is each.empty}
        return native_class.forward(self, x, timestep, **(missing | call_args))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        signature = _signature(getattr(self.bridge.native_class, "_forward", self.bridge.native_class.forward))
        bound = signature.bind_partial(self, *args, **kwargs)
        _, x_name, timestep_name, *_ = parameters = signature.parameters
        catch_all = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        named = {name: value for name, value in bound.arguments.items() if name not in ("self", *catch_all)}
        call_args = {name: value for name, value in (named | bound.kwargs).items() if value is not None}
        x, timestep = call_args.pop(x_name), call_args.pop(timestep_name)
        options = call_args.pop("transformer_options", {})
        call_args.pop(CONTROLNET_TEXT, None)
        inputs = self.bridge.inputs(x, timestep, call_args) | self.bridge.option_inputs(options)
        check_unused(call_args)
        predicted = self.predict(inputs, transformer_options=options)
        shapes = [inputs[name].shape[1:] for name in self.bridge.latents]
        return predicted if len(shapes) == 1 else unpack(predicted, shapes)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **_: Any) -> Any:
        """Return meta tensors under ComfyUI's names, from which its LoRA nodes learn what they would change."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self._paths.weights.items()})
        return destination

    def _decoded(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return weights as the model's files hold them, decoded."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.tensors.items()}
        return dict(stored_weights(self.handle, self.components[0], names, shapes))

    @property
    def components(self) -> tuple[str, ...]:
        """Diffusers' names of the model's transformers."""
        return tuple(name for name in self.handle.checkpoint.components if name.startswith("transformer"))

    @property
    def intercepting(self) -> bool:
        """Whether calls are being recorded or replayed."""
        return self._interceptor is not None

    @property
    def recording_now(self) -> bool:
        """Whether calls are being recorded."""
        return isinstance(self._interceptor, CallRecorder)

    @contextmanager
    def intercepted(self, interceptor: Intercepting) -> Iterator[Intercepting]:
        """Let a ``CallRecorder``, ``CallReplayer`` or ``CallCounter`` answer the calls inside the ``with`` block."""
        before, self._interceptor = self._interceptor, interceptor
        try:
            yield interceptor
        finally:
            self._interceptor = before

    def predict(self, inputs: Mapping[str, Tensor], *, transformer_options: Mapping[str, Any]) -> Tensor:
        """Return the prediction for a call in which ComfyUI may have batched several branches along dim 0.

        That of a model of several latents is packed.

        Args:
            inputs: the family's inputs by name, batch first.
            transformer_options: ComfyUI's, with ``cond_or_uncond``: the branch of each chunk of the batch.

        Raises:
            InvalidRequest: a node needs the layers in this process.
        """
        check_options(transformer_options)
        if self.cached:
            self.cached.note_sigma(transformer_options)
        self._check_once()
        skipped = skipped_blocks(transformer_options, self.bridge.replaceable_blocks)
        indices = list(transformer_options.get("cond_or_uncond") or [0])
        latents = self.bridge.latents
        latent = inputs[latents[0]]
        calls = [
            BranchCall(index=index, inputs=each, latents=latents, changes=self.changes, skipped=skipped)
            for index, each in zip(indices, chunks(inputs, len(latent), len(indices)), strict=True)
        ]
        answers = self._interceptor.answer(calls, self.request) if self._interceptor else self.request(calls)
        return torch.cat([answer.to(device=latent.device) for answer in answers])

    def _check_once(self) -> None:
        """Check the layers at a sampling's first recorded call, and at the first in which other nodes' code has run.

        Not at every call, because the check takes 10 ms for a thousand layers.
        """
        if self.recording_now not in self._checked:
            self._checked.add(self.recording_now)
            check_changed_layer(self.changed_layer())

    def request(self, calls: list[BranchCall]) -> list[Tensor]:
        """Return the predictions of all calls, from requests for those whose weights have the same overlay.

        In a step with one branch the layout's ``cfg`` axis shrinks to one rank: ComfyUI skips the negative prompt
        outside its time range.

        Raises:
            InvalidRequest: a latent is nested, has the wrong number of channels, or is not finite.
        """
        for call in calls:
            self.bridge.check_latents([call.inputs[name] for name in call.latents])
        by_overlay: dict[Overlay | None, list[int]] = {}
        for i, call in enumerate(calls):
            by_overlay.setdefault(call.changes.overlay, []).append(i)
        answers: dict[int, Tensor] = {}
        for overlay, places in by_overlay.items():
            for part in requests_of([calls[i] for i in places]):
                chosen = [places[i] for i in part]
                answers |= zip(chosen, self._request([calls[i] for i in chosen], overlay), strict=True)
        return [answers[i] for i in range(len(calls))]

    def _request(self, calls: list[BranchCall], overlay: Overlay | None) -> list[Tensor]:
        tensors = {f"{i}.{name}": tensor for i, call in enumerate(calls) for name, tensor in call.inputs.items()}
        tensors |= self.cached.position() if self.cached else {}
        message = Forward(
            model=self._spec(len(calls)),
            branches=len(calls),
            cache=self.cached.settings if self.cached else None,
            sampling=self.cached.id if self.cached else "",
            skipped=tuple(call.skipped for call in calls) if any(call.skipped for call in calls) else (),
            adapters=tuple(call.changes.adapters for call in calls),
            overlay=overlay,
        )
        answers = self.handle.call(message, tensors)
        if self.cached:
            self.cached.count(answers)
        return [answers[str(i)] for i in range(len(calls))]

    def _spec(self, branches: int) -> ModelSpec:
        spec, layout = self.handle.spec, self.handle.spec.layout
        if layout is None or layout.cfg <= branches:
            return spec
        return replace(spec, layout=replace(layout, cfg=branches))
