"""Inputs for ComfyUI's nodes that take and give a MODEL or a CONDITIONING, chosen so that a node has an effect."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import comfy.controlnet
import comfy.model_patcher
import comfy.ops
import torch
from comfy_extras import nodes_lt
from helpers.scene import Scene
from natives.case import seeded
from torch import Tensor

WHOLE = {"start_percent": 0.0, "end_percent": 1.0}
VALUES: dict[str, dict[str, Any]] = {
    "APG": {"eta": 0.5},
    "CFGOverride": {"cfg": 2.0},
    "CLIPTextEncodeControlnet": {"text": "a circle"},
    "ConditioningAverage": {"conditioning_to_strength": 0.5},
    "ConditioningMultiply": {"multiplier": 0.5},
    "ConditioningSetArea": {"width": 16, "height": 16, "x": 8},
    "ConditioningSetAreaPercentage": {"width": 0.5, "height": 0.5},
    "ConditioningSetAreaPercentageVideo": {"width": 0.5, "height": 0.5, "temporal": 1.0},
    "ConditioningSetTimestepRange": {"start": 0.0, "end": 0.5},
    "ContextWindowsManual": {"context_length": 2, "context_overlap": 1, "dim": 2},
    "EasyCache": {"reuse_threshold": 3.0, **WHOLE},
    "FluxGuidance": {"guidance": 2.0},
    "FreSca": {"scale_low": 1.2},
    "LazyCache": {"reuse_threshold": 3.0, **WHOLE},
    "LoraLoader": {"clip": None},
    "LoraLoaderBypass": {"clip": None},
    "LTXVContextWindows": {"context_length": 9, "context_overlap": 8},
    "LTXVSpatioTemporalGuidance": {"blocks": "0, 1"},
    "ModelComputeDtype": {"dtype": "bf16"},
    "ModelNoiseScale": {"noise_scale": 1.3},
    "ScaleROPE": {"scale_x": 2.0, "scale_y": 2.0},
    "SkipLayerGuidanceDiT": {"double_layers": "0, 1", "single_layers": "0", **WHOLE},
    "SkipLayerGuidanceDiTSimple": {"double_layers": "0", "single_layers": "0"},
    "SkipLayerGuidanceSD3": {"layers": "0", **WHOLE},
    "TemporalScoreRescaling": {"tsr_k": 0.3, "tsr_sigma": 3.0},
    "UNetCrossAttentionMultiply": {"v": 4.0, "out": 4.0},
    "UNetSelfAttentionMultiply": {"v": 4.0, "out": 4.0},
    "VideoLinearCFGGuidance": {"min_cfg": 2.0},
    "VideoTriangleCFGGuidance": {"min_cfg": 2.0},
    "WanContextWindowsManual": {"context_length": 5, "context_overlap": 4},
    "WanInfiniteTalkToVideo": {"mode": {"mode": "single_speaker"}, "motion_frame_count": 1},
}
"""Values that are not a node's defaults, where those have no effect on a tiny latent and in few steps."""

MASKED = ("DifferentialDiffusion",)
"""Nodes that act on a latent with a mask."""

LEFT_OUT = {("LTXVAddGuide", "attention_mask"), ("LTXVAddGuide", "iclora_parameters")}
"""Optional inputs that change which models a node is for."""


class UnknownInput(Exception):
    """A node needs an object of a type that ``OBJECTS`` lacks."""


class FakeVae:
    """Encodes pictures as random latents of the model's number of channels, and sounds as those of its sounds."""

    audio_sample_rate = 44100

    def __init__(self, scene: Scene) -> None:
        self._scene, self._shape, (self._temporal, self._spatial) = scene, scene.picture.shape, scene.scale
        self.latent_channels = self._shape[1]
        self.downscale_index_formula = (self._temporal, self._spatial, self._spatial)
        self.first_stage_model = SimpleNamespace()

    def encode(self, pixels: Tensor) -> Tensor:
        """Return latents of ``[frames, H, W, 3]``, or of sound ``[B, samples, channels]``."""
        if pixels.ndim == 3:
            return seeded(2)(*self._scene.sound_shape)
        rows, columns = pixels.shape[-3] // self._spatial, pixels.shape[-2] // self._spatial
        random, channels = seeded(pixels.shape[0]), self._shape[1]
        if len(self._shape) == 4:
            return random(len(pixels), channels, rows, columns)
        return random(1, channels, self._scene.positions(len(pixels)), rows, columns)

    def decode(self, latent: Tensor) -> Tensor:
        """Return pixels of a latent."""
        return seeded(1)(1, self._spatial * latent.shape[-2], self._spatial * latent.shape[-1], 3).sigmoid()

    def spacial_compression_encode(self) -> int:
        """Return rows or columns per latent position."""
        return self._spatial

    def temporal_compression_decode(self) -> int:
        """Return frames per latent position."""
        return self._temporal


class FakeControlNet(comfy.controlnet.ControlBase):  # type: ignore[misc]
    """A ControlNet without weights, for nodes that only put it into CONDITIONING."""

    def copy(self) -> "FakeControlNet":
        """Return another one."""
        return FakeControlNet()


class FakeClip:
    """Encodes any text as random numbers."""

    def __init__(self, scene: Scene) -> None:
        self._width = scene.positive[0][0].shape[-1]

    def tokenize(self, text: str) -> str:
        """Return the text."""
        return text

    def encode_from_tokens(self, tokens: str, return_pooled: Any = False) -> Any:
        """Return an embedding, and a pooled one."""
        return seeded(4)(1, 5, self._width), seeded(4)(1, self._width)


def _clip_vision(scene: Scene) -> SimpleNamespace:
    """Return what a vision encoder gives."""
    hidden = seeded(6)(1, 257, 1280)
    return SimpleNamespace(
        last_hidden_state=hidden,
        penultimate_hidden_states=hidden,
        image_embeds=seeded(6)(1, 1024),
        all_hidden_states=hidden[:, None].repeat(1, 27, 1, 1),
    )  # fmt: skip


class FakeAudioProjection:
    """Projects sound to one token."""

    seq_len = 5

    def __call__(self, first: Tensor, later: Tensor) -> Tensor:
        """Return ``[1, 1, 1]``."""
        return seeded(4)(1, 1, 1)


def _model_patch(scene: Scene) -> SimpleNamespace:
    """Return what nodes read of a patch's own model before they set it on a MODEL."""
    module = SimpleNamespace(
        project_modules=[],
        additional_in_dim=0,
        process_input_latent_image=lambda latent: latent,
        audio_proj=FakeAudioProjection(),
        cond_in_channels=3,
    )
    return SimpleNamespace(model=module)


def _uni3c(scene: Scene) -> Any:
    """Return a small Uni3C ControlNet for Wan, as ComfyUI loads it. Older versions have none."""
    module = importlib.import_module("comfy.ldm.wan.uni3c").WanUni3CControlnet(
        conv_out_dim=48, dim=48, ffn_dim=64, num_heads=3, num_layers=2, time_embed_dim=48, out_proj_dim=48,
        mid_channels=32, dtype=torch.float32, operations=comfy.ops.manual_cast,
    )  # fmt: skip
    for place, weight in enumerate(module.parameters()):
        weight.data = seeded(place)(*weight.shape) * 0.3
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(module, load_device=cpu, offload_device=cpu)


OBJECTS: Mapping[str, Callable[[Scene], Any]] = {
    "MODEL": lambda scene: scene.model,
    "LATENT": lambda scene: {"samples": seeded(9)(*scene.picture.shape)},
    "VAE": FakeVae,
    "CLIP": FakeClip,
    "IMAGE": lambda scene: seeded(8)(*scene.pixels, 3).sigmoid(),
    "MASK": lambda scene: (seeded(7)(1, *scene.pixels[1:]) > 0).float(),
    "CLIP_VISION_OUTPUT": _clip_vision,
    "CONTROL_NET": lambda scene: FakeControlNet(),
    "STYLE_MODEL": lambda scene: SimpleNamespace(get_cond=lambda seen: seeded(5)(1, 2, scene.positive[0][0].shape[-1])),
    "LATENT_OPERATION": lambda scene: lambda latent, **options: latent * 0.8,
    "LORA_MODEL": lambda scene: scene.lora,
    "MODEL_PATCH": _model_patch,
    "GLIGEN": lambda scene: SimpleNamespace(),
    "AUDIO": lambda scene: {"waveform": seeded(2)(1, 1, 44100), "sample_rate": 44100},
    "TIMESTEPS_RANGE": lambda scene: (0.2, 1.0),
    "AUDIO_ENCODER_OUTPUT": lambda scene: {
        "encoded_audio_all_layers": [seeded(i)(1, 50, 1024) for i in range(33)], "audio_samples": 16000,
        "audio_feature": seeded(3)(1, 50, 35), "fps": 30.0,
    },
    "WAN_CAMERA_EMBEDDING": lambda scene: seeded(3)(1, 24, *scene.pixels),
    "VOXEL": lambda scene: SimpleNamespace(data=(seeded(11)(1, 4, 4, 4) > 0).float()),
    "COMFY_AUTOGROW_V3": lambda scene: {"image0": seeded(8)(1, *scene.pixels[1:], 3).sigmoid()},
}  # fmt: skip
"""Objects by type. Where they hold numbers, these are random."""

OF_NODES: Mapping[tuple[str, str], Callable[[Scene], Any]] = {
    ("WanUni3CControlnetApply", "model_patch"): _uni3c,
    ("MiniMaxH3AddGuide", "latent"): lambda scene: scene.latent,
}  # fmt: skip
"""Objects for inputs of nodes that take only one kind of a type."""


def apply(node: str, kind: Any, scene: Scene) -> Scene:
    """Return what is sampled behind a node.

    Raises:
        UnknownInput: there is no object for a required input.
    """
    if node in MASKED:
        scene = replace(scene, latent={**scene.latent, "noise_mask": OBJECTS["MASK"](scene) * 0.7})
    inputs = _inputs(node, kind, scene)
    returned = kind.EXECUTE_NORMALIZED(**inputs).args if hasattr(kind, "EXECUTE_NORMALIZED") else None
    if returned is None:
        returned = getattr(kind(), kind.FUNCTION)(**inputs)
    changed: dict[str, Any] = {}
    for type_name, output in zip(kind.RETURN_TYPES, returned, strict=False):
        if type_name == "CONDITIONING":
            changed["negative" if "positive" in changed else "positive"] = output
        elif type_name == "MODEL":
            changed["model"] = output
        elif type_name == "LATENT":
            changed["latent"] = _with_sound(output, scene)
    return replace(scene, **changed)


def _with_sound(latent: dict[str, Any], scene: Scene) -> dict[str, Any]:
    """Return a LATENT of a node, joined with the sound as *LTXVConcatAVLatent* does it if the model makes one."""
    if scene.sound is None or latent["samples"].is_nested:
        return latent
    joined: dict[str, Any] = nodes_lt.LTXVConcatAVLatent.execute(latent, {"samples": scene.sound}).args[0]
    return joined


def _inputs(node: str, kind: Any, scene: Scene) -> dict[str, Any]:
    declared = kind.INPUT_TYPES()
    found = {}
    for group in ("required", "optional"):
        for name, (type_name, *rest) in declared.get(group, {}).items():
            if (node, name) in LEFT_OUT:
                continue
            try:
                found[name] = _value(node, name, type_name, rest[0] if rest else {}, scene)
            except KeyError as error:
                if group == "required":
                    raise UnknownInput(f"{node} needs {name}: {type_name}") from error
    return found


def _value(node: str, name: str, kind: Any, options: Mapping[str, Any], scene: Scene) -> Any:
    """Return a value for an input.

    Raises:
        KeyError: there is no object of this type.
    """
    if name in VALUES.get(node, {}):
        return VALUES[node][name]
    if (node, name) in OF_NODES:
        return OF_NODES[node, name](scene)
    if name == "lora_name":
        return f"{scene.family}.safetensors"
    if kind == "CONDITIONING":
        return _conditioning(name, scene)
    if kind == "INT" and name in ("width", "height", "length", "batch_size"):
        frames, height, width = scene.pixels
        return {"width": width, "height": height, "length": frames, "batch_size": 1}[name]
    if isinstance(kind, str) and kind in OBJECTS:
        return OBJECTS[kind](scene)
    if kind == "STRING" and "default" not in options:
        return ""
    choices = kind if isinstance(kind, list | tuple) else options.get("options")
    return options["default"] if "default" in options or not choices else choices[0]


def _conditioning(name: str, scene: Scene) -> list[Any]:
    """Return the prompt for an input. A node's second prompt is another one than the first."""
    if name.endswith(("_from", "_2", "_NEW", "_DEFAULT", "_B")) or name.startswith("empty"):
        text, extra = scene.positive[0]
        return [[seeded(12)(*text.shape), extra]]
    return scene.negative if name.startswith("negative") else scene.positive
