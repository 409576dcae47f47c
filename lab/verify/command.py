"""The command ``python -m parallel_backend verify``."""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import torch

from parallel_backend.client.devices import choose_devices, parse_devices, ranks_of
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import OPTIONS, ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import real
from parallel_backend.verify.examples import short_name, variants
from parallel_backend.verify.full_float32 import disable_tf32
from parallel_backend.verify.run import Comparison, Report, verifier

from .forward import matrix, memory, pairwise
from .forward.cells import SmallModels
from .forward.matrix import Cell
from .forward.memory import Growth
from .loops import quality
from .loops.run import Loop, LoopVerifier, loops
from .vae.kinds import WIDTH
from .vae.run import VaeCase, compare


def run(options: argparse.Namespace) -> int:
    """Run the comparisons that the options ask for and return the exit status."""
    disable_tf32()
    for name, minimum in (("text_tokens", 1), ("ranks", 1), ("width", 8)):
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise InvalidRequest(f"--{name.replace('_', '-')} {value}: at least {minimum} is needed")
    if options.vae:
        return _run_vae(options)
    if options.encode or options.width is not None:
        raise InvalidRequest("--encode and --width need --vae")
    if options.memory:
        return _run_memory(options)
    if options.quality:
        return _run_quality(options)
    if options.warmup is not None:
        return _run_loops(options)
    return _run_model(options) if options.model else _run_matrix(options)


def _run_memory(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {"memory", "json", "devices"}
    if unsupported:
        raise InvalidRequest(f"--memory has its own models and layouts: leave {', '.join(sorted(unsupported))} out")
    results: list[Growth] = []
    for growth in memory.measure(options.devices):
        results.append(growth)
        if not options.json:
            print(growth.describe(), flush=True)
    if options.json:
        print(msgspec.json.encode([asdict(growth) | {"failed": growth.failed} for growth in results]).decode())
    return int(any(growth.failed for growth in results))


def _run_vae(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {"vae", "encode", "size", "ranks", "width", "json", "devices"}
    if unsupported:
        raise InvalidRequest(
            f"--vae KIND takes --encode, --size, --ranks and --width: leave {', '.join(sorted(unsupported))} out"
        )
    report = compare(
        VaeCase(
            kind=options.vae, ranks=options.ranks or 2, encode=options.encode, size=_size(options),
            width=options.width or WIDTH, devices=options.devices,
        )
    )  # fmt: skip
    print(
        msgspec.json.encode(asdict(report) | {"failed": report.failed}).decode() if options.json else report.describe()
    )
    return int(report.failed)


def _run_loops(options: argparse.Namespace) -> int:
    for name in ("model", "dtype", "ci", "named"):
        if getattr(options, name):
            raise InvalidRequest(f"--warmup runs the step loops of small models: leave {name} out")
    loops = _loops(options)
    devices = choose_devices(options.devices, ranks_of(loop.layout for loop in loops))
    with tempfile.TemporaryDirectory(prefix="verify-models-") as folder, verifier(devices) as runner:
        loop_verifier = LoopVerifier(runner.client, devices, Path(folder))
        return show(map(loop_verifier.compare, loops), as_json=options.json, single=len(loops) == 1)


def _loops(options: argparse.Namespace) -> list[Loop]:
    warmup = None if options.warmup == "all" else _steps(options.warmup)
    layouts = [] if options.layout is None else [ParallelLayout.parse(options.layout)]
    if any(not layout.adapts for layout in layouts):
        raise InvalidRequest(f'--layout "{options.layout}" is exact in all steps: run verify without --warmup')
    if any(layout.warmup != OPTIONS["warmup"] for layout in layouts):
        raise InvalidRequest(
            f"--warmup sets the number of exact steps: leave warmup out of --layout {options.layout!r}"
        )
    chosen = [loop for loop in loops(_variants(options), warmup, layouts) if options.ranks in (None, loop.layout.ranks)]
    if not chosen:
        raise InvalidRequest(f"no layout has {options.ranks} ranks; leave --ranks out, or change it")
    size, text = _size(options), options.text_tokens
    return [replace(loop, size=size or loop.size, text=text or loop.text) for loop in chosen]


def _run_quality(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {"quality", "json", "layout", "warmup", "devices"}
    if unsupported:
        raise InvalidRequest(f"--quality has its own model: leave {', '.join(sorted(unsupported))} out")
    layouts = _quality_layouts(options)
    devices = choose_devices(options.devices, ranks_of(layouts))
    with verifier(devices) as runner:
        exact, rows = quality.measure(runner.client, devices, layouts, lambda text: print(text, file=sys.stderr))
    print(msgspec.json.encode(rows).decode() if options.json else quality.markdown(rows, exact))
    failures = quality.failures(rows)
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


def _quality_layouts(options: argparse.Namespace) -> list[ParallelLayout]:
    warmups = quality.WARMUPS if options.warmup is None else (_steps(options.warmup),)
    layouts = quality.with_warmups((options.layout,) if options.layout else quality.LAYOUTS, warmups)
    if options.layout and ParallelLayout.parse(options.layout).warmup != OPTIONS["warmup"]:
        raise InvalidRequest(f"--quality takes --warmup: leave warmup out of --layout {options.layout!r}")
    if not layouts[0].approximate:
        raise InvalidRequest(f'--layout "{options.layout}" is exact: it loses no quality')
    return layouts


def _set_options(options: argparse.Namespace) -> set[str]:
    """Return the names of the options that the command line sets."""
    return {name for name, value in vars(options).items() if value} - {"run"}


def _steps(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(f"--warmup {text}: write a number of steps")
    return int(text)


def _run_matrix(options: argparse.Namespace) -> int:
    if options.dtype:
        raise InvalidRequest("--dtype needs a MODEL; the small models of the matrix run in float32")
    cells = _cells(options)
    devices = choose_devices(options.devices, ranks_of(cell.layout for cell in cells))
    with tempfile.TemporaryDirectory(prefix="verify-models-") as folder:
        models = SmallModels(Path(folder), torch.device(devices.of_rank(0)))
        return _compare(map(models.comparison, cells), devices, options, time=len(cells) == 1)


def _run_model(options: argparse.Namespace) -> int:
    for name in ("family", "variant", "ci", "named"):
        if getattr(options, name):
            raise InvalidRequest(f"--{name} selects small models: leave it out with MODEL")
    layout = None if options.layout is None else ParallelLayout.parse(options.layout)
    devices = _devices_of_model(options, layout)
    device = torch.device(devices.of_rank(0))
    model = real.open_real(options.model, options.dtype or "auto", _size(options), options.text_tokens, device)
    model.check(layout or ParallelLayout(), devices)
    if not options.json:
        print(model.describe(devices), flush=True)
    layouts = [layout] if layout else real.layouts_on(len(devices.indices))
    comparisons = [comparison for expert in model.experts() for comparison in expert.comparisons(layouts, device)]
    if not options.json:
        print(f"equal means a relative error of at most {comparisons[0].tolerance:.1e}", flush=True)
    return _compare(comparisons, devices, options, time=layout is not None)


def _devices_of_model(options: argparse.Namespace, layout: ParallelLayout | None) -> Devices:
    """Return the devices of ``--ranks`` or of the layout; without both, all that ``--devices`` names."""
    if options.ranks is not None:
        return choose_devices(options.devices, {f"--ranks {options.ranks}": options.ranks})
    return choose_devices(options.devices, ranks_of([layout])) if layout else parse_devices(options.devices or "all")


def _compare(comparisons: Iterable[Comparison], devices: Devices, options: argparse.Namespace, *, time: bool) -> int:
    with verifier(devices) as runner:
        reports = (runner.compare(comparison, time=time) for comparison in comparisons)
        return show(reports, as_json=options.json, single=time)


def show(incoming: Iterable[Report], *, as_json: bool, single: bool) -> int:
    """Print each report when it arrives, or all as JSON at the end, and return the exit status.

    With ``single``, the JSON of one report is an object instead of a list.
    """
    reports: list[Report] = []
    for report in incoming:
        reports.append(report)
        if not as_json:
            print(_line(report), flush=True)
    if as_json:
        objects = [asdict(report) | {"failed": report.failed} for report in reports]
        print(msgspec.json.encode(objects[0] if single and len(objects) == 1 else objects).decode())
    else:
        print(_summary(reports))
    return int(any(report.failed for report in reports))


def _variants(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the class names and variants that the options select."""
    families = sorted({short_name(class_name) for class_name, _ in variants()})
    if options.family is not None and options.family not in families:
        raise InvalidRequest(f"family {options.family!r} does not exist; choose one of {', '.join(families)}")
    pairs = [pair for pair in variants() if options.family in (None, short_name(pair[0]))]
    names = [name for _, name in pairs]
    if options.variant is not None and options.variant not in names:
        raise InvalidRequest(f"variant {options.variant!r} does not exist; choose one of {', '.join(names)}")
    return [pair for pair in pairs if options.variant in (None, pair[1])]


def _cells(options: argparse.Namespace) -> list[Cell]:
    pairs = _variants(options)
    if options.layout is None:
        part = pairwise.ci() if options.ci else matrix.named() if options.named else matrix.every()
        cells = [cell for cell in part if (cell.class_name, cell.variant) in pairs]
    else:
        layout = ParallelLayout.parse(options.layout)
        cells = [Cell(class_name=class_name, variant=name, layout=layout) for class_name, name in pairs]
    cells = [cell for cell in cells if options.ranks in (None, cell.layout.ranks)]
    if not cells:
        raise InvalidRequest("no cell of the matrix matches these options")
    return [_resized(cell, options) for cell in cells]


def _resized(cell: Cell, options: argparse.Namespace) -> Cell:
    size = _size(options)
    cell = cell if size is None else replace(cell, size=size)
    return cell if options.text_tokens is None else replace(cell, text=options.text_tokens)


def _size(options: argparse.Namespace) -> tuple[int, ...] | None:
    if options.size is None:
        return None
    if not re.fullmatch(r"\d+(x\d+){1,2}", options.size):
        raise InvalidRequest(f"--size {options.size}: write TxHxW, or HxW for images, such as 3x30x52")
    return tuple(map(int, options.size.split("x")))


def _line(report: Report) -> str:
    if report.skipped:
        return f"skipped  {report.cell}: {report.skipped}"
    line = f"{'FAILED' if report.failed else 'equal '}   {report.cell}: {report.max_rel_error:.1e}"
    if report.bytes_sent_per_rank != report.bytes_formula_per_rank:
        line += f"; sent {report.bytes_sent_per_rank} bytes, the formulas say {report.bytes_formula_per_rank}"
    if report.seconds_per_step is not None:
        line += f"; {report.seconds_per_step:.3f} s per step"
    if report.seconds_per_step_one_rank is not None:
        line += f", one rank {report.seconds_per_step_one_rank:.3f} s"
    return line


def _summary(reports: Sequence[Report]) -> str:
    failed, skipped = sum(report.failed for report in reports), sum(bool(report.skipped) for report in reports)
    return f"{len(reports) - skipped} run, {failed} failed, {skipped} skipped"
