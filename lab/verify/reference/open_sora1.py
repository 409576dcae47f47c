"""Open-Sora 1.2 against tensors of the authors' ``STDiT3``, ``RFLOW`` and ``VideoAutoencoderPipeline``."""

import inspect
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.open_sora1.files import ARCHITECTURE
from parallel_backend.families.open_sora1.prompt import cleaned, with_scores
from parallel_backend.families.open_sora1.transformer import GENERATED, OpenSora1
from parallel_backend.families.shared.streams import TEXT_MASK
from parallel_backend.interfaces.geometry import IMAGE, LATENT, TIMESTEP

from .difference import FORWARD, Difference, of_tensors, of_texts
from .part import Part, load_weights

_IGNORED = frozenset({
    "enable_flash_attn", "enable_layernorm_kernel", "enable_sequence_parallelism", "drop_path", "class_dropout_prob",
    "only_train_temporal", "freeze_y_embedder", "input_size",
})  # fmt: skip
"""Settings of the authors' class that say how to compute or what to train, and nothing about the result."""

_PLAIN = {"skip_y_embedder": False, "qk_norm_legacy": False}
"""Settings that our module does not have, with the only value that it computes."""


def model(part: Part) -> OpenSora1:
    """Return the part's model.

    Raises:
        InvalidRequest: its config has a setting that is not known, or its weights do not fit.
    """
    config, module_class = part.entry("config"), module_class_of(ARCHITECTURE.class_name)
    known = inspect.signature(module_class.__init__).parameters
    plain = {name for name, value in _PLAIN.items() if config.get(name) == value}
    unknown = sorted(config.keys() - known.keys() - _IGNORED - plain)
    if unknown:
        raise InvalidRequest(f"{part.file}: the setting {unknown[0]} is not known")
    module = module_class(**{name: value for name, value in config.items() if name in known})
    weights = part.load(part.entry("weights"))
    load_weights(module, {name: value for name, value in weights.items() if name not in ARCHITECTURE.unused})
    return OpenSora1(module.eval().requires_grad_(False))


def forward(part: Part) -> Iterator[Difference]:
    """Compare single forwards, and what passes through on the way where the reference has it."""
    family = model(part)
    for cell in part.cells("in.x"):
        theirs, middle = part.under(cell, "in"), part.under(cell, "mid")
        inputs = forward_inputs(theirs)
        if middle:
            got = _on_the_way(family, inputs, middle)
            for name, wanted in middle.items():
                yield of_tensors(f"{part.name} {cell} {name}", got[name], wanted, FORWARD)
        wanted, predicted = part.tensor(f"{cell}.out"), predict(family, inputs)
        used = predicted.shape[1]
        yield of_tensors(f"{part.name} {cell}", predicted, wanted[:, :used], FORWARD)
        whole = stock(family, inputs)
        yield of_tensors(f"{part.name} {cell}, all channels", whole, wanted, FORWARD)


def forward_inputs(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the family's inputs for those of the authors' forward. What has fewer samples is repeated."""
    batch = len(theirs["x"])

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat(batch // len(tensor), *[1] * (tensor.ndim - 1))

    inputs = {
        LATENT: theirs["x"],
        TIMESTEP: repeated(theirs["timestep"]),
        "encoder_hidden_states": repeated(theirs["y"]).squeeze(1),
        TEXT_MASK: repeated(theirs["mask"]).bool(),
        "frame_rate": repeated(theirs["fps"]),
        "resolution": repeated(torch.stack([theirs["height"], theirs["width"]], dim=1)),
    }
    return inputs | ({GENERATED: repeated(theirs["x_mask"]).float()} if "x_mask" in theirs else {})


def predict(family: OpenSora1, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the velocity as the authors have it, data minus noise, by the family's three parts."""
    tokens = family.head(family.run(family.embed(inputs)))
    return -family.unpatchify(tokens, inputs[LATENT].shape[2:])


def stock(family: OpenSora1, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return all channels that the module's own forward predicts."""
    height, width = inputs["resolution"].unbind(1)
    out: Tensor = family.module(
        inputs[LATENT], inputs[TIMESTEP], inputs["encoder_hidden_states"], inputs["frame_rate"], height, width,
        mask=inputs[TEXT_MASK], x_mask=family.generated_frames(inputs),
    )  # fmt: skip
    return out


def _on_the_way(family: OpenSora1, inputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what passes through a forward, by the authors' names.

    Raises:
        InvalidRequest: nothing of ours has one of the names.
    """
    state = family.embed(inputs)
    frames, batch = inputs[LATENT].shape[2], len(inputs[LATENT])
    rate = family.module.fps_embedder(inputs["frame_rate"])
    times = {"": inputs[TIMESTEP], ".given": torch.zeros_like(inputs[TIMESTEP])}
    found = {f"t_embedder{end}": family.module.t_embedder(time) for end, time in times.items()}
    found |= {f"t_block{end}": family.module.t_block(found[f"t_embedder{end}"] + rate) for end in times}
    positions = family.module.embed_patches(inputs[LATENT], *inputs["resolution"][0].unbind())
    plain = family.module.x_embedder(family.module.whole_patches(inputs[LATENT]))
    found |= {"fps_embedder": rate, "y_embedder": state.context["text"][:, None]}
    found |= {"x_embedder": _by_sample(plain, batch), "pos_embed": (positions - plain)[:1]}
    for i, (spatial, temporal) in enumerate(
        zip(family.module.spatial_blocks, family.module.temporal_blocks, strict=True)
    ):
        for name, layer in (("spatial", spatial), ("temporal", temporal)):
            state = family.through(layer, state)
            found[f"{name}_blocks.{i}"] = _by_sample(state.streams[IMAGE], batch)
    found["final_layer"] = _by_sample(family.values(state), batch)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise InvalidRequest(f"nothing of ours is called mid.{missing[0]}; known: {', '.join(found)}")
    assert frames == len(plain) // batch
    return found


def _by_sample(tokens: Tensor, batch: int) -> Tensor:
    by_sample: Tensor = tokens.unflatten(0, (batch, -1)).flatten(1, 2)
    return by_sample


_SCORED = re.compile(r" (aesthetic score|motion score|camera motion): ([\w. ]+?)\.(?= [a-z]+ [a-z]+:|$)")


def prompts(part: Part) -> Iterator[Difference]:
    """Compare texts for T5. Which scores a prompt gets is read off its result."""
    others = [value for value in part.described.values() if isinstance(value, dict) and "scored" in value]
    for pair in [*part.described.get("pairs", []), *others]:
        prompt, scored = pair["prompt"], pair["scored"]
        added = dict(_SCORED.findall(scored.removeprefix(prompt)))
        aesthetic, motion = (
            float(added[name]) if name in added else None for name in ("aesthetic score", "motion score")
        )
        ours = with_scores(prompt, aesthetic=aesthetic, motion=motion, camera=added.get("camera motion", ""))
        yield of_texts(f"{part.name} {prompt!r} scored", ours, scored)
        yield of_texts(f"{part.name} {prompt!r} cleaned", cleaned(scored), pair["cleaned"])


__all__ = ["forward", "forward_inputs", "model", "predict", "prompts"]
