"""A patcher that notes changes of weights as ComfyUI does, for weights that live in the ranks."""

from abc import abstractmethod
from typing import Any

from .bypassed_loras import bypass_patches, check_injections
from .lora_files import remember_group
from .recent_files import begin_sampling
from .weight_changes import Changeable, WeightChanges, changes_of, check_fit
from .weightless_patcher import WeightlessPatcher


class ChangingPatcher(WeightlessPatcher):
    """Keeps what LoRA nodes and others add. The ranks apply it when they compute."""

    @property
    @abstractmethod
    def target(self) -> Changeable:
        """What sends the requests, and needs to know the changes."""

    def check_patches(self, patches: dict[Any, Any]) -> None:
        """Refuse changes that cannot be meant, before they are added."""
        return

    def add_patches(
        self, patches: dict[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Note changes of weights.

        Raises:
            InvalidRequest: they do not fit, or the ranks cannot apply them.
        """
        self.check_patches(patches)
        remember_group(patches.values())
        matched = list(super().add_patches(patches, strength_patch, strength_model))
        check_fit(self.target, self.patches)
        return matched

    def add_hook_patches(
        self, hook: Any, patches: dict[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Note changes of weights that are in force for some prompts or steps.

        Raises:
            InvalidRequest: see ``add_patches``.
        """
        self.check_patches(patches)
        remember_group(patches.values())
        matched = list(super().add_hook_patches(hook, patches, strength_patch, strength_model))
        check_fit(self.target, self.hook_patches[hook.hook_ref])
        return matched

    def set_injections(self, key: str, injections: list[Any]) -> None:
        """Note what nodes inject into layers. The LoRAs of LoraLoaderBypass are changes of weights here.

        Raises:
            InvalidRequest: they are others, or see ``add_patches``.
        """
        check_injections(key, injections)
        patches = bypass_patches({key: injections})
        remember_group(patch[1] for changes in patches.values() for patch in changes)
        check_fit(self.target, patches)
        super().set_injections(key, injections)

    def inject_model(self) -> None:
        """Inject nothing: the layers are not here."""

    def eject_model(self) -> None:
        """See ``inject_model``."""

    def patch_hooks(self, hooks: Any) -> None:
        """Let the next requests use the changes of these hooks, besides this patcher's own."""
        self.current_hooks = hooks
        self.target.changes = WeightChanges()  # lets go of files that may have to make room for others
        self.target.changes = self._changes(hooks)

    def prepare_changes(self) -> None:
        """Write the files of what the next requests begin with, and free those that only older ones needed.

        Raises:
            InvalidRequest: see ``add_patches``.
        """
        begin_sampling()
        self.target.changes = self._changes(None)

    def _changes(self, hooks: Any) -> WeightChanges:
        """Return the changes in force with these hooks. ComfyUI applies hooks anew in every step."""
        combined = {name: list(changes) for name, changes in self.patches.items()}
        for others in (self.get_combined_hook_patches(hooks), bypass_patches(self.injections)):
            for name, changes in others.items():
                combined.setdefault(name, []).extend(changes)
        return changes_of(self.target, combined)
