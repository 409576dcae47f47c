"""A patcher that notes changes of weights as ComfyUI does, for weights that live in the ranks."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from ..backend.executing import executing_lora
from ..backend.session import current
from ..bridges.announcements import announce_unpatched
from .bypassed_loras import bypass_patches, check_injections
from .lora_files import remember_group
from .recent_files import RecentFiles
from .weight_changes import Changeable, WeightChanges, changes_of, fit_added, fit_injected, plain_strengths
from .weightless_patcher import WeightlessPatcher


class ChangingPatcher(WeightlessPatcher):
    """Keeps what LoRA nodes and others add. The ranks apply it when they compute."""

    @property
    @abstractmethod
    def target(self) -> Changeable:
        """What sends the requests, and needs to know the changes."""

    def check_patches(self, patches: dict[Any, Any], lora: str, hook: Any = None) -> None:
        """Refuse invalid changes before they are added."""
        return

    @override
    def add_patches(
        self, patches: dict[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Note changes of weights.

        Raises:
            InvalidRequest: a strength is not a number, none fits its weight, or the ranks cannot apply one.
        """
        lora = executing_lora()
        self.check_patches(patches, lora)
        remember_group(patches.values())
        strengths = plain_strengths(strength_patch, strength_model, lora)
        fitting = fit_added(self.target, patches, *strengths, lora)
        matched = list(super().add_patches(fitting, *strengths))
        names = {key if isinstance(key, str) else key[0] for key in matched}
        announce_unpatched(lora, sorted(name for name in names if not self._is_patched(name)))
        return matched

    @override
    def add_hook_patches(
        self, hook: Any, patches: dict[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Note changes of weights that are in force for some prompts or steps.

        Raises:
            InvalidRequest: see ``add_patches``.
        """
        lora = executing_lora(hook=True)
        self.check_patches(patches, lora, hook)
        remember_group(patches.values())
        strengths = plain_strengths(strength_patch, strength_model, lora)
        fitting = fit_added(self.target, patches, *strengths, lora)
        return list(super().add_hook_patches(hook, fitting, *strengths))

    @override
    def set_injections(self, key: str, injections: list[Any]) -> None:
        """Note what nodes inject into layers. The LoRAs of LoraLoaderBypass are changes of weights here.

        Raises:
            InvalidRequest: they are others, or see ``add_patches``.
        """
        check_injections(key, injections)
        patches = bypass_patches({key: injections})
        remember_group(patch[1] for changes in patches.values() for patch in changes)
        fit_injected(self.target, patches, executing_lora())
        super().set_injections(key, injections)

    @override
    def inject_model(self) -> None:
        """Inject nothing: the layers are not here."""

    @override
    def eject_model(self) -> None:
        """Eject nothing."""

    @override
    def patch_hooks(self, hooks: Any) -> None:
        """Let the next requests use the changes of these hooks, besides this patcher's own."""
        self.current_hooks = hooks
        self.target.changes = WeightChanges()  # lets go of files that may have to make room for others
        self.target.changes = self._changes(hooks)

    @contextmanager
    def prepared_changes(self) -> Iterator[None]:
        """Let the requests inside the ``with`` block begin with this patcher's changes.

        Files that only older requests needed are freed. Clones have the same target, so another one's changes are put
        back after the block.

        Raises:
            InvalidRequest: see ``add_patches``.
        """
        current().part(RecentFiles).begin_sampling()
        before, self.target.changes = self.target.changes, self._changes(None)
        try:
            yield
        finally:
            self.target.changes = before

    def _is_patched(self, name: str) -> bool:
        """Whether ComfyUI changes a weight when it loads a model, not only for hooks."""
        return name.removeprefix(self.target.weight_prefix) not in self.target.weights.unpatched

    def _changes(self, hooks: Any) -> WeightChanges:
        """Return the changes in force with these hooks. ComfyUI applies hooks anew in every step."""
        combined = {name: list(changes) for name, changes in self.patches.items() if self._is_patched(name)}
        for others in (self.get_combined_hook_patches(hooks), bypass_patches(self.injections)):
            for name, changes in others.items():
                combined.setdefault(name, []).extend(changes)
        return changes_of(self.target, combined)
