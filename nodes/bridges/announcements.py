"""What the ranks do not take over from ComfyUI's process, said once: its own flags, and callbacks of other nodes."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import comfy.cli_args

from ..backend.session import current
from .attention_choice import OVERRIDE, chosen_kernel

Part = Literal["model", "vae", "text encoder"]
_ATTENTION = "choose attention in Parallel Loader or Parallel Model"
_NOTHING = "they have no such option"
_TEXT = "they run the text encoder in Parallel Loader's dtype"
FLAGS: Mapping[Part, Mapping[str, str]] = {
    "model": {
        "use_split_cross_attention": _ATTENTION,
        "use_quad_cross_attention": _ATTENTION,
        "use_pytorch_cross_attention": _ATTENTION,
        "use_sage_attention": "choose attention sage in Parallel Loader or Parallel Model",
        "use_flash_attention": "choose attention flash in Parallel Loader or Parallel Model",
        "use_ck_attention": _ATTENTION,
        "force_upcast_attention": _NOTHING,
        "dont_upcast_attention": _NOTHING,
        "fast": _NOTHING,
        "deterministic": _NOTHING,
        "force_channels_last": _NOTHING,
        "supports_fp8_compute": _NOTHING,
        "enable_triton_backend": _NOTHING,
    },
    "vae": {"cpu_vae": "they run a VAE on their devices, in the CPU's dtype: use ComfyUI's own VAE"},
    "text encoder": {
        "fp8_e4m3fn_text_enc": _TEXT,
        "fp8_e5m2_text_enc": _TEXT,
        "fp16_text_enc": _TEXT,
        "bf16_text_enc": _TEXT,
        "fp32_text_enc": _TEXT,
    },
}
"""ComfyUI's flags that change what these parts compute, and what does the same in the ranks.

Those for the dtype of a MODEL (``--bf16-unet``, ``--force-fp16``) and of a VAE (``--bf16-vae``) are not among them: our
nodes obey them.
"""

_MOST_NAMED = 8
"""How many weights a sentence names."""


class _Said(set[str]):
    """Sentences that the log has."""


def flags_without_effect(*parts: Part, args: Any = comfy.cli_args.args) -> str:
    """Return a sentence about the flags of this process that do not reach the ranks, or nothing. Log it once.

    Args:
        parts: what the ranks run.
    """
    flags = ((name, remedy) for part in parts for name, remedy in FLAGS[part].items())
    given = [(name, remedy) for name, remedy in flags if getattr(args, name, None)]
    if not given:
        return ""
    by_remedy: dict[str, list[str]] = {}
    for name, remedy in given:
        by_remedy.setdefault(remedy, []).append(_as_flag(name, getattr(args, name)))
    reasons = "; ".join(f"{', '.join(flags)} ({remedy})" for remedy, flags in by_remedy.items())
    sentence = f"not obeyed by the ranks: {reasons}"
    _say_once(sentence)
    return sentence


def announce_callbacks(callbacks: Mapping[str, Mapping[str, Iterable[Any]]], *, own: str) -> None:
    """Log, once for each key, that a node's callbacks run in ComfyUI's process and change nothing in the ranks.

    Args:
        callbacks: of a MODEL, by kind and key.
    """
    for kind, by_key in callbacks.items():
        for key, functions in by_key.items():
            if key != own and functions:
                _say_once(
                    f"the callback {key or 'without a name'} ({kind}) of another node runs in ComfyUI's process: what "
                    "it changes there, such as settings of torch, does not reach the ranks of a parallel model"
                )


def _as_flag(name: str, value: Any) -> str:
    """Return a flag as it stands on the command line."""
    values = [] if isinstance(value, bool) else sorted(each.value for each in value)
    dashed = name.replace("_", "-").replace("fp8-e", "fp8_e")
    return " ".join([f"--{dashed}", *values])


def announce_attention(transformer_options: Mapping[str, Any]) -> None:
    """Log, once, that a node's choice of a kernel leaves the ranks' as it is."""
    if kernel := chosen_kernel(transformer_options.get(OVERRIDE)):
        _say_once(
            f"ModelAttentionBackend chooses {kernel}, and the input attention of Parallel Loader or Parallel Model "
            "chooses the kernel that computes it in the ranks"
        )


def announce_dense(name: str) -> None:
    """Log, once, that a model with weights for sparse attention runs without it."""
    _say_once(
        f"{name} has weights for sparse attention, which the ranks do not compute: each of its tokens attends to all "
        "others, as in ComfyUI without its node BlockSparseAttention (Model Sparse Attention)"
    )


def announce_unpatched(lora: str, names: Sequence[str]) -> None:
    """Log, once, that a LoRA has changes of weights that ComfyUI alone leaves as they are."""
    if names:
        _say_once(
            f"{lora} changes {_listed(names)}, which ComfyUI leaves as they are when it loads a model, so they stay as "
            "they are here, too: a LoRA hook changes them"
        )


def announce_misfits(lora: str, misfits: Mapping[str, str]) -> None:
    """Log, once, which changes of a LoRA are left out, as in ComfyUI, and why the first one is."""
    if misfits:
        reason = next(iter(misfits.values()))
        _say_once(f"{lora} does not fit {_listed([*misfits])}, which stay as they are: {reason}")


def announce_text_only(lora: str) -> None:
    """Log, once, that a LoRA has changes of a text encoder alone."""
    _say_once(f"{lora} fits no weight of the transformer: only its changes of the text encoder are used")


def besides_the_model(file: str, names: Sequence[str], missing_part: str) -> str:
    """Return sentences about a file that holds more than its model, or less than its name says. Log each once.

    Args:
        file: its name.
        names: of weights that are left aside.
        missing_part: the file of another part that does not exist, if its name says that there are some.
    """
    sentences = []
    if names:
        sentences.append(f"{file} has {_listed(names)} besides the model, left aside as in ComfyUI")
    if missing_part:
        sentences.append(f"{file} is taken for the whole model, since {missing_part} does not exist")
    for sentence in sentences:
        _say_once(sentence)
    return "; ".join(sentences)


def _listed(names: Sequence[str]) -> str:
    others = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {others} more weights" if others > 0 else "")


def _say_once(sentence: str) -> None:
    said = current().part(_Said)
    if sentence not in said:
        said.add(sentence)
        logging.warning("Parallel DiT: %s", sentence)
