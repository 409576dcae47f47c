"""Differences that are planted in a copy of ComfyUI's source, and what the contract or mypy has to say of each."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Change:
    """One change of one file: every ``old`` becomes ``new``."""

    file: str
    old: str
    new: str

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Make the change for as long as the ``with`` block runs."""
        file = root / self.file
        before = file.read_text(encoding="utf-8")
        if self.old not in before:
            pytest.skip(f"in this version {self.file} has no {self.old!r}")
        file.write_text(before.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(before, encoding="utf-8")


@dataclass(frozen=True)
class Planted:
    """Changes that make one difference, or none.

    Attributes:
        name: what is changed, for the name of the test.
        changes: the changes.
        line: parts of the one line that names it, in their order; none if the contract leaves it to mypy.
        message: what mypy says of it, likewise. With neither, it is no difference to us.
    """

    name: str
    changes: tuple[Change, ...]
    line: tuple[str, ...] = ()
    message: tuple[str, ...] = ()

    def concerns(self, module: str) -> bool:
        """Whether a module of the contract is beside a file that is changed: the others need no check."""
        changed = [change.file.removesuffix(".py").split("/") for change in self.changes]
        return any(module.split(".")[:2] == parts[:2] for parts in changed)

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Make the changes for as long as the ``with`` block runs."""
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change.applied(root))
            yield


SAMPLE, SAMPLERS, SD, CONDS = "comfy/sample.py", "comfy/samplers.py", "comfy/sd.py", "comfy/conds.py"
PATCHER, MODELS, SCHEMA = "comfy/model_patcher.py", "comfy/supported_models.py", "comfy_api/latest/_io.py"
MANAGEMENT, FLUX, BASE = "comfy/model_management.py", "comfy/ldm/flux/model.py", "comfy/model_base.py"

PLANTED = [
    Planted(
        "a removed function",
        (Change(SAMPLE, "def prepare_noise(", "def make_noise("),),
        ("comfy.sample.prepare_noise: it is missing from comfy/sample.py", "nodes/sampler.py"),
        message=("nodes/sampler.py", 'no attribute "prepare_noise"'),
    ),
    Planted(
        "a renamed parameter",
        (Change(SAMPLE, "seed, noise_inds=None)", "seed, batch_inds=None)"),),
        ("comfy.sample.prepare_noise: parameter 3 is batch_inds, and we pass noise_inds", "nodes/sampler.py"),
    ),
    Planted(
        "a renamed keyword",
        (Change(SAMPLE, "latent_image, noise_mask=None, callback", "latent_image, mask=None, callback"),),
        ("comfy.sample.sample_custom: no parameter noise_mask, which we pass by name", "nodes/sampler.py"),
        message=("nodes/sampler.py", '"noise_mask" for "sample_custom"'),
    ),
    Planted(
        "a new parameter that is required",
        (
            Change(
                "folder_paths.py", "def get_folder_paths(folder_name: str)", "def get_folder_paths(folder_name, user)"
            ),
        ),
        message=("nodes/backend/checkpoints.py", '"user" in call to "get_folder_paths"'),
    ),
    Planted(
        "a new parameter with a default",
        (
            Change(
                "folder_paths.py", "def get_folder_paths(folder_name: str)", "def get_folder_paths(folder_name, u=1)"
            ),
        ),
    ),
    Planted(
        "a removed class attribute",
        (Change(SAMPLERS, "    SAMPLERS = SAMPLER_NAMES\n", ""),),
        message=("nodes/sampler.py", 'no attribute "SAMPLERS"'),
    ),
    Planted(
        "a renamed attribute of instances",
        (Change(SD, "self.output_device", "self.result_device"),),
        message=("nodes/remote/vae.py", 'no attribute "output_device"'),
    ),
    Planted(
        "a removed constant",
        (Change(MANAGEMENT, "OOM_EXCEPTION", "OUT_OF_MEMORY"),),
        message=("nodes/backend/connection.py", 'no attribute "OOM_EXCEPTION"'),
    ),
    Planted(
        "a moved class",
        (
            Change(CONDS, "class CONDNoiseShape(", "class CONDOther("),
            Change("comfy/float.py", "import torch\n", "import torch\n\nclass CONDNoiseShape: ...\n"),
        ),
        message=("nodes/bridges/custom_model.py", 'no attribute "CONDNoiseShape"'),
    ),
    Planted(
        "a moved class that is still imported",
        (
            Change(CONDS, "class CONDNoiseShape(", "from comfy.float import CONDNoiseShape\nclass CONDOther("),
            Change(
                "comfy/float.py",
                "import torch\n",
                "import torch\n\nclass CONDNoiseShape:\n    def __init__(self, cond): ...\n",
            ),
        ),
    ),
    Planted(
        "a method that moved to a base class",
        (
            Change(
                SAMPLERS, "class KSampler:", "class Shared:\n    SAMPLERS = SAMPLER_NAMES\n\nclass KSampler(Shared):"
            ),
            Change(SAMPLERS, "class KSampler(Shared):\n", "class KSampler(Shared):\n    OTHERS = []\n"),
        ),
    ),
    Planted(
        "a renamed parameter of a method that is overridden",
        (Change(SD, "def decode(self, samples_in, vae_options={})", "def decode(self, latents, vae_options={})"),),
        (
            "comfy.sd.VAE.decode: no parameter samples_in, which ours has: it takes (latents, vae_options)",
            "remote/vae.py",
        ),
    ),
    Planted(
        "a new parameter of a method that is overridden",
        (Change(SD, "def encode(self, pixel_samples)", "def encode(self, pixel_samples, vae_options={})"),),
        ("comfy.sd.VAE.encode: ours lacks the parameter vae_options", "nodes/remote/vae.py"),
        message=("nodes/remote/vae.py", '"encode" incompatible with supertype'),
    ),
    Planted(
        "a wrapper that is called otherwise",
        (
            Change(
                SAMPLERS,
                "executor.execute(model, conds, x_in, timestep,",
                "executor.execute(model, x_in, conds, timestep,",
            ),
        ),
        ("comfy.samplers._calc_cond_batch_outer: there is executor.execute(model, x_in,", "nodes/remote/patcher.py"),
    ),
    Planted(
        "a callback that is called otherwise",
        (Change(PATCHER, "callback(self, unpatch_all)", "callback(self)"),),
        ("comfy.model_patcher.ModelPatcher.detach: there is callback(self), not", "nodes/remote/patcher.py"),
    ),
    Planted(
        "something new that is read from a stand-in",
        (
            Change(
                SD,
                "        self.load_model(tokens)\n        device",
                "        self.cond_stage_model.warm()\n        device",
            ),
        ),
        ("comfy.sd.CLIP: it now reads self.cond_stage_model.warm, in comfy/sd.py:", "nodes/remote/text_encoder.py"),
    ),
    Planted(
        "something new that is read from the transformer",
        (Change(BASE, "return self.diffusion_model.dtype", "return self.diffusion_model.compute_dtype"),),
        ("comfy.model_base.BaseModel: it now reads self.diffusion_model.compute_dtype", "nodes/remote/transformer.py"),
    ),
    Planted(
        "a renamed key",
        (Change(SAMPLERS, '"disable_cfg1_optimization"', '"keep_uncond"'),),
        (
            'comfy.samplers.sampling_function: it does not contain "disable_cfg1_optimization"',
            "nodes/remote/added_to_steps.py",
        ),
    ),
    Planted(
        "a kind of text encoder",
        (Change(SD, "    QWEN_IMAGE = ", "    QWEN = "),),
        ("comfy.sd.CLIPType: no QWEN_IMAGE in comfy/sd.py", "nodes/families/qwen_image.py"),
    ),
    Planted(
        "a renamed field of an architecture",
        (Change(FLUX, "    guidance_embed: bool", "    guidance: bool"),),
        ("comfy.ldm.flux.model.FluxParams: no parameter guidance_embed", "nodes/families/flux.py"),
    ),
    Planted(
        "a supported model that is detected otherwise",
        (Change(MODELS, '"guidance_embed": False', '"guidance_embed": None'),),
        ("comfy.supported_models.FluxSchnell: {'image_model': 'flux', 'guidance_embed': False} is detected as None",),
    ),
    Planted(
        "a supported model with another latent format",
        (Change(MODELS, "    latent_format = latent_formats.Wan22", "    latent_format = latent_formats.Wan21"),),
        ("comfy.supported_models.WAN22_T2V: its latent_format is Wan21, not Wan22", "nodes/families/wan.py"),
    ),
    Planted(
        "a latent format with other channels",
        (Change("comfy/latent_formats.py", "latent_channels = 48", "latent_channels = 64"),),
        ("comfy.latent_formats.Wan22.latent_channels: it is 64, not 48", "nodes/families/wan.py"),
    ),
    Planted(
        "a part of the node interface",
        (Change(SCHEMA, '    unique_id = "UNIQUE_ID"', '    node_id = "UNIQUE_ID"'),),
        message=("nodes/loader.py", 'no attribute "unique_id"'),
    ),
    Planted(
        "an input of a node",
        (Change("nodes.py", '"seed": ("INT",', '"number": ("INT",'),),
        ("nodes.KSampler: no input seed", "workflows/api"),
    ),
    Planted(
        "an input of a node that a helper makes",
        (Change("comfy_extras/nodes_video.py", '"codec",\n        options=', '"coding",\n        options='),),
        ("comfy_extras.nodes_video.SaveVideo: no input codec", "workflows/api"),
    ),
    Planted(
        "a node with another id",
        (Change("comfy_extras/nodes_ip2p.py", 'node_id="InstructPixToPixConditioning"', 'node_id="InstructPix"'),),
        (
            "comfy_extras.nodes_ip2p.InstructPixToPixConditioning: there is no node of this id",
            "nodes/families/cogvideox.py",
        ),
    ),
    Planted(
        "a node in another file",
        (
            Change("comfy_extras/nodes_pag.py", 'node_id="PerturbedAttentionGuidance"', 'node_id="PerturbedGuidance"'),
            Change(
                "comfy_extras/nodes_sd3.py", 'node_id="SkipLayerGuidanceSD3"', 'node_id="PerturbedAttentionGuidance"'
            ),
        ),
    ),
]
