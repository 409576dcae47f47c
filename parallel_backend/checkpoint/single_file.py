"""A model in a safetensors or GGUF file, or in numbered parts of one, as loaders of ComfyUI take it. Headers only."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..families.architecture import BESIDE, describes
from .architectures import VAES, Recognised, architectures, in_shape, recognise
from .checkpoint import Checkpoint, StoredComponent, file_state
from .content import content_of
from .stored_tensor import StoredTensor, check_readable
from .weight_headers import GGUF_SUFFIX, read_file, read_files, weights_under

SUFFIXES = (".safetensors", ".sft", GGUF_SUFFIX)
"""Endings of the names of files that can be read."""

_TEXT_PREFIX = "text_encoders."
"""Beginning of the names of text encoders in files that hold a whole model. ComfyUI reads these itself.

Its classes of the supported models look for no other name.
"""

_IN_MEMORY = re.compile(r"/proc/\d+/fd/\d+$")

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")

_PICKLED = (".ckpt", ".pt", ".pth", ".bin")
"""Endings of files that are refused, because opening one can run code."""

_TRANSFORMER = ("model.diffusion_model.", "model.model.", "net.", "model.")
"""What a transformer's names may begin with. ComfyUI's ``unet_prefix_from_state_dict`` has the same ones."""

_DESCRIBED = ("STDiT3", "VideoAutoencoderPipeline")
"""Classes that are published as a file of weights and a ``config.json`` beside it."""

_MOST_BYTES = 1 << 20
"""Largest such JSON file in bytes."""

_FEWEST = 6
"""How many names ComfyUI wants to see before it takes their beginning away."""

_VAE = ("vae.", "first_stage_model.")
"""What a VAE's names may begin with in files that hold a whole model."""

_VAE_LAYERS = ("decoder.", "decoder_ema.", "spatial_vae.")
"""Layers of a VAE that no transformer has."""

Prefixes = dict[str, str]
"""The beginning of each component's names, by diffusers' component name."""


def is_in_memory(path: str | Path) -> bool:
    """Whether a path leads to a file in another process's memory, which ``Parallel Model`` writes."""
    return _IN_MEMORY.match(str(path)) is not None


class SingleFile(Checkpoint):
    """A transformer, a VAE, or both with other parts, in one file in original or diffusers' names.

    Attributes:
        files: the file, or all parts of a model in parts.
        missing_part: a part that does not exist, according to the name of a file that holds the whole model.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers, and check that the file holds something that is supported.

        Raises:
            InvalidRequest: the format is another, a part is missing, a header is wrong, or no architecture is known.
        """
        super().__init__(path)
        if path.suffix.lower() not in SUFFIXES and not is_in_memory(path):
            reason = "opening one can run code: choose the model's safetensors file"
            reason = reason if path.suffix.lower() in _PICKLED else f"choose a {SUFFIXES[0]} file"
            raise InvalidRequest(f"{path.name} is not loaded: {reason}")
        self.files, self.missing_part = _parts(path)
        self._header = read_files(self.files)
        self._beside = _beside(self.files[0])
        self._metadata = {**self._header.metadata, **({BESIDE: self._beside[1]} if self._beside else {})}
        self._weights: dict[str, dict[str, StoredTensor]] = {}
        self._prefixes: dict[str, str] = {}
        self._recognised: dict[str, Recognised] = {}
        self._unknown: dict[str, str] = {}
        self._recognise_all()

    def _recognise_all(self) -> None:
        reasons: list[str] = []
        for prefixes in possible_prefixes(self._header.tensors.keys()):
            self._unknown = {}
            for component, prefix in prefixes.items():
                self._recognise(component, prefix)
            if self._recognised:
                return
            reasons += self._unknown.values()
        raise InvalidRequest(f"{self.missing_part} does not exist" if self.missing_part else reasons[0])

    def _recognise(self, component: str, prefix: str) -> None:
        """Find out what a component is. The others of a whole model are usable without it."""
        try:
            weights = weights_under(prefix, self._header)
            shapes = {name: tensor.shape for name, tensor in weights.items()}
            found = recognise(shapes, self._metadata, VAES if component == "vae" else architectures())
        except InvalidRequest as error:
            self._unknown[component] = f"{self.name}: {error}"
        else:
            self._recognised[component], self._prefixes[component] = found, prefix
            self._weights[component] = in_shape(found.class_name, weights)

    @property
    def name(self) -> str:
        return "the copied model" if is_in_memory(self.path) else self.path.name

    @property
    def components(self) -> Mapping[str, str]:
        return {component: found.class_name for component, found in self._recognised.items()}

    @property
    def pipeline(self) -> str:
        found = self._recognised.get("transformer")
        return found.pipeline if found else ""

    @property
    def holds_text_encoders(self) -> bool:
        """Whether the file also holds text encoders that ComfyUI can read from it. It reads one file, not parts."""
        return len(self.files) == 1 and self._names_text_encoders()

    def _names_text_encoders(self) -> bool:
        return any(name.startswith(_TEXT_PREFIX) for name in self._header.tensors)

    def check_known(self, component: str) -> None:
        if component in self._unknown:
            raise InvalidRequest(self._unknown[component])
        if component == "text_encoder" and len(self.files) > 1 and self._names_text_encoders():
            raise InvalidRequest(
                f"{self.name}: ComfyUI cannot read text encoders from a model in {len(self.files)} parts"
            )
        if component in self._recognised:
            self._check_dtypes(component)

    def config(self, component: str) -> dict[str, Any]:
        """The config follows from names and shapes."""
        return dict(self._found(component).config)

    def stored(self, component: str) -> StoredComponent:
        native, prefix = self._found(component).native, self._prefixes[component]
        self._check_dtypes(component)
        return StoredComponent(
            files=self.files, name=self.name, prefix=prefix, native=native, missing_part=self.missing_part
        )

    def weights(self, component: str) -> Mapping[str, StoredTensor]:
        self.stored(component)
        return self._weights[component]

    def left_over(self, component: str) -> frozenset[str]:
        return self._found(component).left_over

    def _found(self, component: str) -> Recognised:
        if component not in self._recognised:
            raise InvalidRequest(f"{self.name} has no {component} (it has {', '.join(self._recognised)})")
        return self._recognised[component]

    def stamp(self) -> str:
        return hashlib.sha256(repr([file_state(file) for file in self._all_files]).encode()).hexdigest()[:16]

    def content(self) -> str:
        """A file may have any name."""
        return content_of((str(number), file) for number, file in enumerate(self._all_files))

    @property
    def _all_files(self) -> tuple[Path, ...]:
        return (*self.files, self._beside[0]) if self._beside else self.files

    def _check_dtypes(self, component: str) -> None:
        left_over = self._recognised[component].left_over
        try:
            for name, tensor in self._weights[component].items():
                if name not in left_over:
                    check_readable(tensor)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.name}: {error}") from error


def _parts(path: Path) -> tuple[tuple[Path, ...], Path | None]:
    """Return the file, or all parts of the set that it is one of, and a part that does not exist.

    A file that is named as a part may hold all, as ComfyUI takes it: others are then missing, or hold the same names.
    """
    found = _PART.search(path.stem)
    if found is None:
        return (path,), None
    start, count = path.stem[: found.start()], int(found[2])
    files = tuple(path.with_name(f"{start}-{i:05d}-of-{count:05d}{path.suffix}") for i in range(1, count + 1))
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        return (path,), missing
    names = [name for file in files for name in read_file(file).tensors]
    return ((path,) if len(set(names)) < len(names) else files), None


def _beside(path: Path) -> tuple[Path, str] | None:
    """Return the JSON file that describes a file of weights, and its text; None if it describes no class of ours.

    It has the file's name, or is called ``config.json``. Classes of ComfyUI follow from names and shapes alone, and
    folders for ComfyUI hold files of many models.
    """
    for file in (path.with_suffix(".json"), path.with_name(BESIDE)):
        try:
            text = file.read_text(encoding="utf-8") if file.stat().st_size <= _MOST_BYTES else "{}"
            entries = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        if any(describes(entries, class_name) for class_name in _DESCRIBED):
            return file, text
    return None


def possible_prefixes(names: Collection[str]) -> tuple[Prefixes, ...]:
    """Return what a file may hold according to its names, the likeliest first."""
    start = _transformer_prefix(names)
    vae = next((vae for vae in _VAE if any(name.startswith(vae) for name in names)), None)
    if vae is not None and all(name.startswith(vae) for name in names):
        return ({"vae": vae},)
    inside = {} if vae is None else {"vae": vae}
    if not start and any(name.startswith(_VAE_LAYERS) for name in names):
        return {"vae": ""}, {"transformer": ""} | inside
    return ({"transformer": start} | inside,)


def _transformer_prefix(names: Iterable[str]) -> str:
    """Return what a transformer's names begin with; "" if they are plain."""
    counts = Counter(next((start for start in _TRANSFORMER if name.startswith(start)), "") for name in names)
    *whole, last = _TRANSFORMER
    most = max(whole, key=lambda start: counts[start])
    return next((start for start in (most, last) if counts[start] >= _FEWEST), "")
