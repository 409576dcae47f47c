"""Checks of a ``Sample``'s step loop: the sampler and its settings, and the tensors that belong to no branch."""

import math
from collections.abc import Mapping

from .. import packages
from ..errors import InvalidRequest
from ..interfaces.geometry import Shape
from ..protocol.messages import HISTORY, Sample
from ..samplers.prediction_types import PREDICTIONS
from ..samplers.samplers import SAMPLERS


def check_settings(message: Sample) -> None:
    """Check a step loop's sampler, noise and guidance.

    Raises:
        InvalidRequest: the loop cannot work. The message names the value and what would work.
    """
    if message.sampler not in SAMPLERS:
        raise InvalidRequest(
            f"the backend's step loop has no sampler {message.sampler!r}, only {', '.join(SAMPLERS)}; ComfyUI's own "
            "loop has all of them and works with the same MODEL"
        )
    _check_noise(message)
    _check_guidance(message)


def check_tensors(message: Sample, shapes: Mapping[str, Shape]) -> Shape:
    """Check the tensors that belong to no branch, and return the shape of ``x``.

    Raises:
        InvalidRequest: see ``check_settings``.
    """
    history = {name: shape for name, shape in shapes.items() if name.startswith(HISTORY)}
    others = {name: shape for name, shape in shapes.items() if name not in history}
    x = _check_x(others, discrete=PREDICTIONS[message.prediction].discrete)
    _check_start(message, shapes["sigmas"][0] - 1, history, x)
    return x


def _check_x(shapes: Mapping[str, Shape], *, discrete: bool) -> Shape:
    inpainting = [name for name in ("mask", "noise", "latent") if name in shapes]
    wanted = {"x", "sigmas", *(["log_sigmas"] if discrete else []), *inpainting}
    if not wanted <= shapes.keys() or inpainting not in ([], ["mask", "latent"], ["mask", "noise", "latent"]):
        raise InvalidRequest("sampling needs x and sigmas; inpainting also needs mask and latent, and optionally noise")
    if unknown := shapes.keys() - wanted:
        raise InvalidRequest(
            f"{', '.join(sorted(unknown))} cannot be used: sampling takes {', '.join(sorted(wanted))} and "
            "{branch}.{argument}"
        )
    x = shapes["x"]
    if len(shapes["sigmas"]) != 1 or shapes["sigmas"][0] < 2:
        raise InvalidRequest(f"sigmas has shape {list(shapes['sigmas'])}: at least one step, so two sigmas, is needed")
    for name in inpainting:
        if len(shapes[name]) != len(x) or any(a not in (1, b) for a, b in zip(shapes[name], x, strict=True)):
            raise InvalidRequest(
                f"{name} of shape {list(shapes[name])} does not broadcast to the latent of shape {list(x)}"
            )
    return x


def _check_start(message: Sample, steps: int, history: Mapping[str, Shape], latent: Shape) -> None:
    """Refuse a start that the sampler cannot have reached."""
    if not 0 <= message.first_step < steps:
        raise InvalidRequest(f"first_step={message.first_step} with {steps} steps: 0 to {steps - 1} works")
    names = [f"{HISTORY}{i}" for i in range(len(history))]
    most = SAMPLERS[message.sampler].remembers if message.first_step else 0
    if len(history) > most or set(names) != history.keys() or any(shape != latent for shape in history.values()):
        raise InvalidRequest(
            f"{message.sampler} at step {message.first_step} goes on with at most {most} tensors {HISTORY}0, "
            f"{HISTORY}1, ... of the latent's shape {list(latent)}, and got {', '.join(history) or 'none'}"
        )


def _check_guidance(message: Sample) -> None:
    if message.branches not in (1, 2) or not math.isfinite(message.cfg):
        raise InvalidRequest(
            f"cfg={message.cfg} with {message.branches} branches: one or two branches and a finite cfg work"
        )
    if message.branches == 1 and message.cfg != 1.0:
        raise InvalidRequest(
            f"cfg={message.cfg} needs a negative conditioning as the second branch; only cfg=1.0 works without"
        )


def _check_noise(message: Sample) -> None:
    """Refuse settings from which a sampler cannot draw noise."""
    if not 0 <= message.seed < 2**64:
        raise InvalidRequest(f"seed={message.seed}: a seed from 0 to 2**64 - 1 works")
    if not (math.isfinite(message.noise_scale) and message.noise_scale >= 0.0):
        raise InvalidRequest(f"noise_scale={message.noise_scale}: a finite number of at least 0 works")
    if not 0.0 < message.first_sigma <= 1.0:
        raise InvalidRequest(f"first_sigma={message.first_sigma}: a number above 0 and at most 1 works")
    kind = SAMPLERS[message.sampler].noise
    if kind in ("gaussian", "brownian on device") and message.noise_device == "cuda" != message.model.devices.kind:
        raise InvalidRequest(
            f"{message.sampler} would draw its noise on a GPU, and the ranks run on the CPU, which draws other "
            "numbers; run the sampler in ComfyUI's own loop"
        )
    if kind in ("brownian", "brownian on device"):
        packages.load("torchsde")
