"""diffusers' class of LTX-Video's VAE, with LTX-2.3's upsamplings of time, or of rows and columns, alone.

diffusers has these in a class of its own, whose encoder is as wide as the latent has channels.
"""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

from diffusers import AutoencoderKLLTXVideo as _Published
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoUpsampler3d

_STRIDES = {"spatial": (1, 2, 2), "temporal": (2, 1, 1)}


class AutoencoderKLLTXVideo(_Published):  # type: ignore[misc]
    """The class with upsamplings of different kinds.

    Args:
        upsample_type: "spatiotemporal", "spatial" or "temporal" for each block of the decoder, the finest first; None
            for the first of them everywhere.
        options: diffusers' own.
    """

    def __init__(self, *args: Any, upsample_type: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_to_config(upsample_type=upsample_type)
        blocks = reversed(self.decoder.up_blocks)
        for block, kind, factor in zip(blocks, upsample_type or (), self.config.upsample_factor, strict=False):
            if kind in _STRIDES:
                block.upsamplers[0] = _apart(block.upsamplers[0], _STRIDES[kind], factor)

    # diffusers passes on the entries of a config that the signature names.
    _own = signature(_Published.__init__)
    __init__.__signature__ = _own.replace(  # type: ignore[attr-defined]
        parameters=[*_own.parameters.values(), Parameter("upsample_type", Parameter.KEYWORD_ONLY, default=None)]
    )


def _apart(layer: Any, stride: tuple[int, int, int], factor: int) -> Any:
    """Return an upsampling of another kind in place of one."""
    return LTXVideoUpsampler3d(
        in_channels=layer.conv.in_channels,
        stride=stride,
        is_causal=layer.conv.is_causal,
        residual=layer.residual,
        upscale_factor=factor,
    )
