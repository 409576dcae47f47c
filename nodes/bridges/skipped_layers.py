"""Which of the transformer's blocks a node leaves out.

A node replaces a block by a function in ``transformer_options["patches_replace"]["dit"]``. SkipLayerGuidance's returns
its arguments as they are, so the block is left out, which the ranks can do. Any other function needs the block here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from comfy.model_management import InterruptProcessingException

from ..backend.packs import maker
from .refusals import BLOCKS, REPLACEMENTS, layers_unavailable

_ARGUMENTS = (
    "img", "txt", "vec", "pe", "attn_mask", "attention_mask", "self_attention_mask", "prompt_timestep", "num_tokens",
    "rope_cos", "rope_sin", "modulation_dims", "modulation_dims_img", "modulation_dims_txt",
)  # fmt: skip
"""What ComfyUI's transformers pass to such a function besides the transformer options."""

Options = Mapping[str, Any]
Replacement = Callable[[dict[str, Any], dict[str, Any]], Any]


def skipped_blocks(options: Options, replaceable: Mapping[str, int]) -> tuple[int, ...]:
    """Return the numbers of the blocks that are left out, in the order in which the model runs its blocks.

    Args:
        replaceable: how many blocks of each kind ComfyUI's transformer lets a node replace, in the order of the model.
            It ignores replacements of others, and so does this.

    Raises:
        InvalidRequest: a node replaces a block by something else.
    """
    replaced: Mapping[tuple[str, int], Replacement] = (options.get(REPLACEMENTS) or {}).get(BLOCKS, {})
    blocks = [(kind, i) for kind, count in replaceable.items() for i in range(count)]
    for kind, i in blocks:
        if (function := replaced.get((kind, i))) is not None:
            _check_returns_its_arguments(function, f"{kind} {i}", options)
    return tuple(number for number, block in enumerate(blocks) if block in replaced)


def _check_returns_its_arguments(function: Replacement, block: str, options: Options) -> None:
    """Call a replacement with markers, and refuse it unless it hands them back."""
    unchanged = False
    cause: Exception | None = None
    markers: dict[str, Any] = {name: object() for name in _ARGUMENTS}

    def original_block(args: Any) -> Any:
        raise RuntimeError("the block runs on the ranks")

    try:
        returned = function({**markers, "transformer_options": options}, {"original_block": original_block})
        unchanged = returned["img"] is markers["img"] and returned.get("txt", markers["txt"]) is markers["txt"]
    except InterruptProcessingException:
        raise
    except Exception as error:  # a function that computes anything fails on a marker, in a way of its own
        cause = error
    if not unchanged:
        action = f"a node replaces {block} of the model, and not to leave it out"
        raise layers_unavailable(action, maker(function)) from cause
