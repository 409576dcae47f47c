"""The command ``python -m parallel_backend verify MODEL``."""

import argparse

import torch

from ..client.devices import choose_devices, parse_devices, ranks_of
from ..layout.parallel_layout import ParallelLayout
from ..protocol.model_spec import Devices
from . import real
from .full_float32 import disable_tf32
from .options import check_least, size
from .report import show
from .run import verifier


def run(options: argparse.Namespace) -> int:
    """Compare a checkpoint in its layouts with diffusers' own forward and return the exit status."""
    disable_tf32()
    check_least(options, {"text_tokens": 1, "ranks": 1})
    layout = None if options.layout is None else ParallelLayout.parse(options.layout)
    devices = _devices_of_model(options, layout)
    device = torch.device(devices.of_rank(0))
    model = real.open_real(options.model, options.dtype or "auto", size(options.size), options.text_tokens, device)
    model.check(layout or ParallelLayout(), devices)
    if not options.json:
        print(model.describe(devices), flush=True)
    layouts = [layout] if layout else real.layouts_on(len(devices.indices))
    comparisons = [comparison for expert in model.experts() for comparison in expert.comparisons(layouts, device)]
    if not options.json:
        print(f"equal means a relative error of at most {comparisons[0].tolerance:.1e}", flush=True)
    with verifier(devices) as runner:
        reports = (runner.compare(comparison, time=layout is not None) for comparison in comparisons)
        return show(reports, as_json=options.json, single=layout is not None)


def _devices_of_model(options: argparse.Namespace, layout: ParallelLayout | None) -> Devices:
    """Return the devices of ``--ranks`` or of the layout; without both, all that ``--devices`` names."""
    if options.ranks is not None:
        return choose_devices(options.devices, {f"--ranks {options.ranks}": options.ranks})
    return choose_devices(options.devices, ranks_of([layout])) if layout else parse_devices(options.devices or "all")
