"""The command ``python -m lab verify``."""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import torch

from parallel_backend.client.devices import add_option, choose_devices, ranks_of
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import OPTIONS, ParallelLayout
from parallel_backend.protocol.model_spec import Compile, Devices
from parallel_backend.verify.examples import short_name, variants
from parallel_backend.verify.full_float32 import disable_tf32
from parallel_backend.verify.options import add_sizes, check_least, size
from parallel_backend.verify.report import show
from parallel_backend.verify.run import Comparison, verifier

from .forward import matrix, memory, pairwise
from .forward.cells import SmallModels
from .forward.matrix import Cell
from .forward.memory import Growth
from .loops import cache_quality, quality
from .loops.run import Loop, LoopVerifier, loops
from .reference import difference
from .reference import run as references
from .vae.kinds import WIDTH
from .vae.run import VaeCase, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    _add_cells(parser)
    _add_other_comparisons(parser)
    add_option(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, layouts and sizes."""
    parser.add_argument("--family", metavar="NAME", help="one family only, such as flux")
    parser.add_argument("--variant", metavar="NAME", help="one variant of a family only, such as dev")
    parser.add_argument(
        "--layout", metavar="LAYOUT", help='one layout only, such as "cfg=2 ulysses=2" (default: a matrix of layouts)'
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="only layouts of N ranks")
    add_sizes(parser)
    parser.add_argument("--compile", action="store_true", help="with compiled blocks")
    parser.add_argument("--ci", action="store_true", help="only the part of the matrix that CI runs")
    parser.add_argument("--named", action="store_true", help="only the part of the matrix with sizes from real use")


def _add_other_comparisons(parser: argparse.ArgumentParser) -> None:
    """Add the options for other checks than single forwards."""
    parser.add_argument(
        "--memory", action="store_true",
        help="instead: measure the memory that the ranks need for 2 GB of sharded weights",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", metavar="N|all",
        help="instead: run whole step loops of PipeFusion and displaced patch, whose first N steps are exact, and "
        "compare them with the same algorithm in one process; with all, also with the exact loop",
    )  # fmt: skip
    parser.add_argument(
        "--quality", action="store_true",
        help="instead: generate pictures with the shipped checkpoint and tabulate how far those of approximate layouts "
        "are from exact ones",
    )  # fmt: skip
    parser.add_argument(
        "--cache", action="store_true",
        help="with --quality: tabulate how far pictures and clips with step caches are from those of all steps",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=int, metavar="N", help=f"with --quality --cache: how many (default {cache_quality.PROMPTS})"
    )
    parser.add_argument(
        "--vae", metavar="KIND",
        help="instead: compare a VAE whose rows are split over --ranks N with diffusers' own; KIND is a small random "
        "VAE such as image or wan21, or a checkpoint's folder",
    )  # fmt: skip
    parser.add_argument(
        "--reference", metavar="FOLDER", type=Path,
        help="instead: compare with the reference tensors of another implementation that a folder holds",
    )  # fmt: skip
    parser.add_argument("--encode", action="store_true", help="with --vae: encode instead of decode")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="with --vae: what the ranks compute in (default float32); diffusers' result in float32 is compared with",
    )  # fmt: skip
    parser.add_argument("--width", type=int, metavar="N", help="with --vae: channels of its first level (default 32)")


def run(options: argparse.Namespace) -> int:
    """Run the comparisons that the options ask for and return the exit status."""
    disable_tf32()
    check_least(options, {"text_tokens": 1, "ranks": 1, "width": 8, "prompts": 1})
    if options.reference:
        return _run_reference(options)
    if options.vae:
        return _run_vae(options)
    if options.encode or options.width is not None or options.dtype:
        raise InvalidRequest("--encode, --width and --dtype need --vae")
    if options.memory:
        return _run_memory(options)
    if (options.cache or options.prompts) and not options.quality:
        raise InvalidRequest("--cache and --prompts need --quality")
    if options.quality:
        return _run_cache_quality(options) if options.cache else _run_quality(options)
    if options.warmup is not None:
        return _run_loops(options)
    return _run_matrix(options)


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


def _run_reference(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {"reference", "json"}
    if unsupported:
        raise InvalidRequest(f"--reference has its own models and inputs: leave {', '.join(sorted(unsupported))} out")
    return difference.show(references.compare(options.reference), as_json=options.json)


def _run_vae(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {
        "vae", "encode", "size", "ranks", "width", "dtype", "json", "devices",
    }  # fmt: skip

    if unsupported:
        raise InvalidRequest(
            "--vae KIND takes --encode, --size, --ranks, --width and --dtype: "
            f"leave {', '.join(sorted(unsupported))} out"
        )
    report = compare(
        VaeCase(
            kind=options.vae, ranks=options.ranks or 2, encode=options.encode, size=size(options.size),
            width=options.width or WIDTH, dtype=options.dtype or "float32", devices=options.devices,
        )
    )  # fmt: skip
    print(
        msgspec.json.encode(asdict(report) | {"failed": report.failed}).decode() if options.json else report.describe()
    )
    return int(report.failed)


def _run_loops(options: argparse.Namespace) -> int:
    for name in ("ci", "named", "compile"):
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
    latent, text = size(options.size), options.text_tokens
    return [replace(loop, size=latent or loop.size, text=text or loop.text) for loop in chosen]


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


def _run_cache_quality(options: argparse.Namespace) -> int:
    unsupported = _set_options(options) - {"quality", "cache", "prompts", "json", "devices"}
    if unsupported:
        raise InvalidRequest(f"--quality --cache has its own model: leave {', '.join(sorted(unsupported))} out")
    prompts = options.prompts or cache_quality.PROMPTS
    if prompts > cache_quality.PROMPTS:
        raise InvalidRequest(f"--prompts {prompts}: there are {cache_quality.PROMPTS}")
    devices = choose_devices(options.devices, {"one rank": 1})
    with verifier(devices) as runner:
        rows = cache_quality.measure(
            runner.client, devices, prompts, cache_quality.STEPS, lambda text: print(text, file=sys.stderr)
        )
    print(msgspec.json.encode(rows).decode() if options.json else cache_quality.markdown(rows))
    failures = cache_quality.failures(rows)
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
    return {name for name, value in vars(options).items() if value}


def _steps(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(f"--warmup {text}: write a number of steps")
    return int(text)


def _run_matrix(options: argparse.Namespace) -> int:
    cells = _cells(options)
    devices = choose_devices(options.devices, ranks_of(cell.layout for cell in cells))
    with tempfile.TemporaryDirectory(prefix="verify-models-") as folder:
        models = SmallModels(Path(folder), torch.device(devices.of_rank(0)))
        compiled: Compile = "blocks" if options.compile else "off"
        comparisons = (replace(models.comparison(cell), compile=compiled) for cell in cells)
        return _compare(comparisons, devices, options, time=len(cells) == 1)


def _compare(comparisons: Iterable[Comparison], devices: Devices, options: argparse.Namespace, *, time: bool) -> int:
    with verifier(devices) as runner:
        reports = (runner.compare(comparison, time=time) for comparison in comparisons)
        return show(reports, as_json=options.json, single=time)


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
    latent = size(options.size)
    cell = cell if latent is None else replace(cell, size=latent)
    return cell if options.text_tokens is None else replace(cell, text=options.text_tokens)
