"""The settings that ComfyUI's page offers: a text for each variable."""

from typing import Any

from ...parallel_backend import env, saved
from ...parallel_backend.client.devices import parse_devices
from ...parallel_backend.errors import InvalidRequest


def shown_settings() -> dict[str, Any]:
    """Return by variable the chosen text, and whether the environment goes before it.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    return {each.name: {"chosen": each.chosen, "fixed": each.is_set()} for each in _offered()}


def change_settings(changes: dict[str, Any]) -> dict[str, Any]:
    """Save texts by variable, and return all as ``shown_settings`` does. An empty text is the default again.

    Raises:
        InvalidRequest: a variable is not offered, a text is invalid, or the file cannot be written.
    """
    offered = {each.name: each for each in _offered()}
    for name, text in changes.items():
        if name not in offered:
            raise InvalidRequest(f"{name!r} is no setting of the page: choose one of {', '.join(offered)}")
        if not isinstance(text, str):
            raise InvalidRequest(f"{name}={text!r}: it must be a text")
        offered[name].of(text)
        if name == env.DEVICES.name and text and text != "all":
            parse_devices(text)
    saved.save(env.settings_file(), changes)
    return shown_settings()


def _offered() -> "list[env.Variable[object]]":
    return [each for each in env.variables() if each.in_page]
