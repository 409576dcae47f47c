"""A ModelPatcher for weights that live in the ranks: it occupies no memory here, and nothing can read the weights."""

from typing import Any, NoReturn

import comfy.model_patcher
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest


class WeightlessPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Reports zero sizes on ComfyUI's device, so using what it holds evicts none of ComfyUI's own models."""

    def __deepcopy__(self, memo: Any) -> "WeightlessPatcher":
        """Return a clone: the weights are in the ranks, and are not copied."""
        clone: WeightlessPatcher = self.clone()
        return clone

    @override
    def model_size(self) -> int:
        """Return the bytes on ComfyUI's device: none."""
        return 0

    @override
    def loaded_size(self) -> int:
        """Return the bytes on ComfyUI's device: none."""
        return 0

    @override
    def memory_required(self, input_shape: Any) -> int:
        """Return the bytes that a step needs on ComfyUI's device beyond the latents: none."""
        return 0

    @override
    def get_key_patches(self, filter_prefix: str | None = None) -> NoReturn:
        """Refuse model merging, which reads weights.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("a parallel model cannot be merged or saved: its weights live in the backend's processes")

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[explicit-override, unused-ignore]
        """Refuse ComfyUI's own multi-GPU cloning, which would only copy the stand-in.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this model already runs on several GPUs; choose them in Parallel Loader's devices")
