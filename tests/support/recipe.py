"""What ``docs/adding-a-family.md`` asks of every family, and the sentence about each step that is missing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REGISTRY = "parallel_backend/families/registry.py"
NO_ROW = "{folder}: give it a row in parallel_backend/families/registry.py"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the registry, and the name that documentation has for it."""

    folder: str
    name: str
    in_files: bool
    in_core: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the recipe. ``{folder}``, ``{name}``, ``{title}`` and ``{clip_type}`` are the family's.

    Attributes:
        file: where it is.
        pattern: the regular expression that the file then holds.
        sentence: what is said about a family without it.
        of_files: whether it concerns only families that single files hold.
        of_core: whether it concerns only families that ComfyUI has.
    """

    file: str
    pattern: str
    sentence: str
    of_files: bool = False
    of_core: bool = False


_TRANSFORMER, _FILES = (
    "parallel_backend/families/{folder}/transformer.py",
    "parallel_backend/families/{folder}/files.py",
)
STEPS = (
    Step(file=_TRANSFORMER, pattern=r"class {name}\(\w+\)",
         sentence="{folder}: write class {name}(Family) in its transformer.py"),
    Step(file=_TRANSFORMER, pattern=r"    defaults: ClassVar",
         sentence="{folder}: list diffusers' defaults in the class attribute defaults"),
    Step(file=_TRANSFORMER, pattern=r"    first_layer: ClassVar",
         sentence="{folder}: name the layer that the patches pass first in the class attribute first_layer"),
    Step(file=_TRANSFORMER, pattern=r"    values_alive: ClassVar",
         sentence="{folder}: measure the class attribute values_alive with python -m lab working-memory"),
    Step(file=_TRANSFORMER, pattern=r"def variants\(",
         sentence="{folder}: list small models of every kind in variants"),
    Step(file=_FILES, pattern=r"ARCHITECTURE = Architecture\(", of_files=True,
         sentence="{folder}: say how its files are recognised in ARCHITECTURE of its files.py, or in_files=False"),
    Step(file=_FILES, pattern=r"    convert=|    native=\(\),", of_files=True,
         sentence="{folder}: give ARCHITECTURE a converter of the original names, or none of those in native"),
    Step(file="nodes/families/{folder}.py", pattern=r"class {name}\(",
         sentence="{folder}: write its bridge, class {name}, in nodes/families/{folder}.py"),
    Step(file="scripts/core_contract/lists/families/{folder}.py", pattern=r"ENTRIES = \(", of_files=True, of_core=True,
         sentence="{folder}: list what its bridge relies on in scripts/core_contract/lists/families/{folder}.py"),
    Step(file="tests/inside_comfyui/natives/{folder}.py", pattern=r"CASES = \{{", of_files=True, of_core=True,
         sentence="{folder}: make tiny models of ComfyUI's own class in tests/inside_comfyui/natives/{folder}.py"),
    Step(file="tests/inside_comfyui/natives/{folder}.py", pattern=r"SAMPLING = ", of_files=True, of_core=True,
         sentence="{folder}: name its ModelSampling node in tests/inside_comfyui/natives/{folder}.py"),
    Step(file="tests/inside_comfyui/text/test_clip.py", pattern=r'\("{clip_type}", \(', of_files=True,
         sentence="{folder}: list its text encoders' published shapes in tests/inside_comfyui/text/test_clip.py"),
    Step(file="README.md", pattern=r"\| Models \|.*\b{title}",
         sentence="{folder}: add {title} to the list of README.md"),
    Step(file="web/docs/ParallelLoader.md", pattern=r"\n\| {title}[^|]*\|",
         sentence="{folder}: add a repository with {title} to web/docs/ParallelLoader.md"),
    Step(file="docs/synchronisations.md", pattern=r"\n\| {folder} ",
         sentence="{folder}: count where the host waits with python -m lab synchronisations --write"),
)  # fmt: skip


def families(root: Path) -> Iterator[Family]:
    """Yield the families that the registry of a checkout has."""
    text = (root / REGISTRY).read_text(encoding="utf-8")
    for folder, name, rest in re.findall(r'": Row\(folder="(\w+)", name="(\w+)"(.*)\),', text):
        title = re.match(r'"""([\w.-]+)', _text(root, _TRANSFORMER.format(folder=folder)))
        yield Family(
            folder=folder, name=name, in_files="in_files=False" not in rest, in_core="in_core=False" not in rest,
            title=title[1] if title else name,
        )  # fmt: skip


def missing(root: Path) -> Iterator[str]:
    """Yield a sentence for each step that a family of a checkout lacks."""
    listed = list(families(root))
    for path in sorted((root / "parallel_backend/families").glob("*/transformer.py")):
        if path.parent.name not in {family.folder for family in listed}:
            yield NO_ROW.format(folder=path.parent.name)
    for family in listed:
        for step in STEPS:
            concerns = (family.in_files or not step.of_files) and (family.in_core or not step.of_core)
            if concerns and not found(root, step, family):
                yield filled(step.sentence, root, family)


def found(root: Path, step: Step, family: Family) -> bool:
    """Whether a family has a step."""
    pattern = filled(step.pattern, root, family, escape=True)
    return re.search(pattern, _text(root, filled(step.file, root, family))) is not None


def filled(template: str, root: Path, family: Family, *, escape: bool = False) -> str:
    """Return a template with the family's names, for a regular expression if ``escape``."""
    bridge = _text(root, f"nodes/families/{family.folder}.py")
    clip_type = re.search(r'clip_type="(\w+)"', bridge)
    names = {"folder": family.folder, "name": family.name, "title": family.title}
    names["clip_type"] = clip_type[1] if clip_type else ""
    if escape:
        names = {key: re.escape(value) for key, value in names.items()}
        names["clip_type"] = names["clip_type"] or r"\w+"  # the ranks run its text encoder
    return template.format(**names)


def _text(root: Path, file: str) -> str:
    path = root / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""
