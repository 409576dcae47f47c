"""Who may use the panel's routes."""

from types import SimpleNamespace

import pytest
from any_folder_name.nodes.panel import guard

pytestmark = pytest.mark.newest
HOST = "127.0.0.1:8188"
USERS = SimpleNamespace(users={"default": "default", "ann_1": "Ann"})


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": HOST},
        {"Host": HOST, "Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"},
        {"Host": HOST, "Sec-Fetch-Site": "none"},
        {"Host": "comfy.example", "Origin": "https://comfy.example:443"},
        {"Host": "Comfy.example", "Origin": "https://comfy.example"},
    ],
)
def test_the_page_itself_is_answered(headers) -> None:
    assert guard.refused_origin(headers) == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": HOST, "Origin": "http://evil.example"},
        {"Host": HOST, "Origin": "http://127.0.0.1:9999"},
        {"Host": HOST, "Origin": "null"},
        {"Host": HOST, "Sec-Fetch-Site": "cross-site"},
        {"Host": HOST, "Sec-Fetch-Site": "same-site"},
        {"Host": HOST, "Origin": f"http://{HOST}", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
    ],
)
def test_another_origin_is_refused(headers) -> None:
    assert guard.refused_origin(headers) == guard.NOT_THIS_PAGE


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "127.2.2.2,::1", "localhost"])
def test_where_no_other_machine_reaches_comfyui_nobody_needs_a_user(listen, monkeypatch) -> None:
    monkeypatch.setattr(guard.args, "listen", listen)
    assert guard.refused_change({}, USERS) == ""


@pytest.mark.parametrize("listen", ["0.0.0.0", "127.0.0.1,0.0.0.0", "0.0.0.0,::", "10.0.0.2", "some-name"])
@pytest.mark.parametrize(
    ("several", "headers", "allowed"),
    [
        (False, {}, False),
        (False, {"comfy-user": "default"}, False),
        (True, {}, False),
        (True, {"comfy-user": "bob"}, False),
        (True, {"comfy-user": ""}, False),
        (True, {"comfy-user": "ann_1"}, True),
    ],
)
def test_where_other_machines_reach_it_only_its_users_change_something(
    listen, several, headers, allowed, monkeypatch
) -> None:
    monkeypatch.setattr(guard.args, "listen", listen)
    monkeypatch.setattr(guard.args, "multi_user", several)
    assert guard.refused_change(headers, USERS) == ("" if allowed else guard.NO_USER)
