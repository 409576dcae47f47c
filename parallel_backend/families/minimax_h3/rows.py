"""The rows of MiniMax-H3's image stream: which inputs they come from, where they are, and what each of them is."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import LATENT, SOUND, Geometry, Shape, Shapes
from ..shared.patchify import second_size
from .times import CONDITIONING_TIMES, MASK_LEVELS, SIGMA_SHIFTS, SOUND_MASK_LEVELS, SOUND_SCALE

TEXT = "encoder_hidden_states"
TEXT_LABELS = "text_labels"
VIDEO_IDS, SOUND_IDS = "video_ids", "sound_ids"
VIDEO_ROWS, SOUND_ROWS = "video_rows", "sound_rows"
VIDEO_ROWS_IDS, SOUND_ROWS_IDS = "video_rows_ids", "sound_rows_ids"
MASK_LABELS, SOUND_MASK_LABELS = "mask_labels", "sound_mask_labels"

OPTIONAL = (
    TEXT_LABELS, VIDEO_ROWS, VIDEO_ROWS_IDS, SOUND_ROWS, SOUND_ROWS_IDS, MASK_LEVELS, MASK_LABELS, SOUND_MASK_LEVELS,
    SOUND_MASK_LABELS, SIGMA_SHIFTS, CONDITIONING_TIMES, SOUND_SCALE,
)  # fmt: skip
PAIRS = (
    (VIDEO_ROWS, VIDEO_ROWS_IDS), (SOUND_ROWS, SOUND_ROWS_IDS), (MASK_LEVELS, MASK_LABELS),
    (SOUND_MASK_LEVELS, SOUND_MASK_LABELS),
)  # fmt: skip
"""Inputs of which none goes without the other."""

LEVELS = {MASK_LABELS: MASK_LEVELS, SOUND_MASK_LABELS: SOUND_MASK_LEVELS}
"""Inputs of indices, and what they are indices into."""

AXES, EARS = 3, 2
"""Numbers in a position (time, row, column), and channels of the sound."""

PICTURE_TAG, TEXT_TAG, SOUND_TAG = range(3)
"""What a row is, as the modulation's rows are ordered."""
TAGS = 3


def check(config: Mapping[str, object], geometry: Geometry, shapes: Shapes) -> tuple[int, int]:
    """Check the shapes of a branch's inputs, and return the number of text tokens and of image rows.

    Raises:
        InvalidRequest: names the input, its shape and what would work.
    """
    text, widths = shapes[TEXT], (config["text_dim"], config["hidden_size"])
    if len(text) != 3 or text[1] < 1 or text[2] not in widths:
        raise InvalidRequest(
            f"conditioning of shape {list(text)} does not fit this model, which takes [batch, tokens, {widths[0]}] "
            f"from its text encoder, or [batch, tokens, {widths[1]}] after its own text layers"
        )
    sound, channels = shapes[SOUND], config["audio_in_channels"]
    if len(sound) != 4 or sound[1:3] != (channels, EARS) or sound[3] < 1:
        raise InvalidRequest(
            f"a latent of sound of shape {list(sound)} does not fit this model, which takes [batch, {channels}, "
            f"{EARS}, times]: use Empty MiniMax H3 AV Latent"
        )
    for one, other in PAIRS:
        if (one in shapes) != (other in shapes):
            raise InvalidRequest(f"{one} and {other} go together, and only one of them is given")
    wanted = dict(_wanted(config, geometry, shapes))
    for name, shape in wanted.items():
        if name in shapes and shapes[name][1:] != shape:
            listed = ", ".join(map(str, ("batch", *shape)))
            raise InvalidRequest(
                f"{name} of shape {list(shapes[name])} does not fit the latents: [{listed}] would work"
            )
    rows = sum(wanted[name][0] for name in (VIDEO_IDS, SOUND_IDS, VIDEO_ROWS, SOUND_ROWS))
    return text[1], rows


def _wanted(config: Mapping[str, object], geometry: Geometry, shapes: Shapes) -> Iterator[tuple[str, Shape]]:
    """Yield each input's shape without the batch, as the latents and the numbers of given rows demand it."""
    video, sound = math.prod(geometry.grid(shapes[LATENT][2:])), EARS * shapes[SOUND][3]
    widths = {VIDEO_ROWS: geometry.channels * math.prod(geometry.patch), SOUND_ROWS: config["audio_in_channels"]}
    for rows, ids in PAIRS[:2]:
        given = second_size(shapes, rows, 0)
        yield rows, (given, widths[rows])  # type: ignore[misc]
        yield ids, (given, AXES)
    for count, ids, levels, labels in (
        (video, VIDEO_IDS, MASK_LEVELS, MASK_LABELS), (sound, SOUND_IDS, SOUND_MASK_LEVELS, SOUND_MASK_LABELS),
    ):  # fmt: skip
        yield ids, (count, AXES)
        yield labels, (count,)
        yield levels, (second_size(shapes, levels, 1),)
    yield TEXT_LABELS, (shapes[TEXT][1],)
    yield SIGMA_SHIFTS, (2,)
    yield CONDITIONING_TIMES, (2,)
    yield SOUND_SCALE, ()


def positions(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the positions of text and of image rows, ``[L, 3]`` and ``[S, 3]``. Text has only times: 0, 1, 2, ..."""
    names = (VIDEO_IDS, SOUND_IDS, VIDEO_ROWS_IDS, SOUND_ROWS_IDS)
    image = torch.cat([inputs[name][0].float() for name in names if name in inputs])
    text = image.new_zeros(inputs[TEXT].shape[1], AXES)
    text[:, 0] = torch.arange(len(text), device=text.device)
    return text, image


def modulations(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return, for each text token and image row, which row of the modulation it has: ``[B, L]`` and ``[B, S]``.

    The modulation has a row for each of ``times.times``, and in it one for each tag.
    """
    text = inputs[TEXT]
    tags = inputs.get(TEXT_LABELS, torch.full(text.shape[:2], TEXT_TAG, device=text.device))
    return tags, torch.cat([time * TAGS + tag for time, tag in _image_times(inputs)], dim=1)


def _image_times(inputs: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield the number of its time for each row, by kind of row, and the kind's tag."""
    batch, device = len(inputs[LATENT]), inputs[LATENT].device

    def same(rows: int, time: int) -> Tensor:
        return torch.full((batch, rows), time, dtype=torch.int64, device=device)

    levels = inputs[MASK_LEVELS].shape[1] if MASK_LEVELS in inputs else 0
    for ids, labels, time, first, tag in (
        (VIDEO_IDS, MASK_LABELS, 0, 4, PICTURE_TAG), (SOUND_IDS, SOUND_MASK_LABELS, 1, 4 + levels, SOUND_TAG),
    ):  # fmt: skip
        yield first + inputs[labels] if labels in inputs else same(inputs[ids].shape[1], time), tag
    for rows, time, tag in ((VIDEO_ROWS, 2, PICTURE_TAG), (SOUND_ROWS, 3, SOUND_TAG)):
        if rows in inputs:
            yield same(inputs[rows].shape[1], time), tag
