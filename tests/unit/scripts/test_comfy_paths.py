"""Which ComfyUI checkouts are found, and in which order."""

import sys
from pathlib import Path

import pytest

from scripts import comfy_paths, install


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder without any ComfyUI, and no variable that names one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("COMFYUI_PATH", "COMFYUI_PATHS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(comfy_paths, "ROOT", tmp_path / "projects" / "parallel" / "checkout")
    return tmp_path


def make(folder: Path, version: str, requirements: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    return folder


def test_order_of_preference(home):
    around = make(home / "projects", "0.8.0")
    clone = make(comfy_paths.cache_folder(), "0.27.0")
    old, newer = make(home / "ComfyUI-a", "0.9.2"), make(home / "ComfyUI-b", "0.10.0")
    newest = make(home / "ComfyUI-c", "1.0.0")
    nightly = make(home / "ComfyUI-d", "nightly")
    (home / "ComfyUI-notes").mkdir()
    assert comfy_paths.candidates() == [around, nightly, newest, newer, old, clone]


def test_a_checkout_that_is_too_old_is_found_but_not_used(home, capsys):
    old, usable = make(home / "ComfyUI", "0.3.64"), make(home / "ComfyUI-new", "0.8.0")
    assert comfy_paths.checkouts() == [usable, old]
    assert comfy_paths.candidates() == [usable]
    assert install.find_comfyuis(dev=True) == [usable]
    assert f"Skipping ComfyUI 0.3.64 in {old}: 0.8.0 is the oldest version that works." in capsys.readouterr().out


def test_variables_name_the_checkouts(home, monkeypatch):
    at_home = make(home / "ComfyUI", "0.27.0")
    first, second = make(home / "one", "0.8.0"), make(home / "two", "0.27.0")
    assert not comfy_paths.are_named()
    monkeypatch.setenv("COMFYUI_PATH", str(at_home))
    assert comfy_paths.candidates() == [at_home]
    monkeypatch.setenv("COMFYUI_PATHS", f"{first}:{second}")
    assert comfy_paths.candidates() == [first, second]
    assert comfy_paths.are_named()
    monkeypatch.setenv("COMFYUI_PATHS", str(home / "gone"))
    with pytest.raises(SystemExit, match=r"COMFYUI_PATHS names .*gone, which is not a ComfyUI checkout"):
        comfy_paths.candidates()


def test_the_quickstart_takes_the_first_and_the_tests_all(home):
    older, newer = make(home / "ComfyUI-a", "0.8.0"), make(home / "ComfyUI-b", "0.27.0")
    assert install.find_comfyuis(dev=False) == [newer]
    assert install.find_comfyuis(dev=True) == [newer, older]


def test_the_lowest_versions_go_with_the_oldest(home, monkeypatch):
    commands: list[tuple[str, ...]] = []
    for name in ("clone_comfyui", "install_frontend"):
        monkeypatch.setattr(install, name, lambda *_: pytest.fail("the lowest versions need neither"))
    monkeypatch.setattr(install, "pip", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(sys, "prefix", str(home))
    assert install.find_comfyuis(dev=True, lowest=True) == []
    make(home / "ComfyUI-b", "0.33.0", "comfy-kitchen==0.2.31\n")
    older = make(home / "ComfyUI-a", "0.8.0", "comfy-kitchen>=0.2.3\n")
    found = install.find_comfyuis(dev=True, lowest=True)
    install.install(found, dev=True, lowest=True)
    assert found == [older]
    assert commands[0][:2] == ("-c", str(install.LOWEST))
    assert "comfy-kitchen>=0.2.3" in commands[0]


def test_requirements_without_torch_and_the_web_page(home):
    lines = "comfyui-frontend-package==1.2.3\ntorch\ntorchsde\ntorchaudio\nav>=16 # video\n\ncomfy-aimdo==0.4.10\n"
    comfyui = make(home / "ComfyUI", "0.27.0", lines)
    assert install.comfyui_requirements(comfyui) == ["torchsde", "av>=16", "comfy-aimdo==0.4.10", "torchvision"]
    assert install.frontend_version(comfyui) == "1.2.3"


def test_what_two_comfyuis_cannot_share(home):
    old = make(home / "ComfyUI-a", "0.27.0", "torchsde\nav>=14\ncomfy-kitchen==0.2.16\ncomfy-aimdo==0.4.10\nsame==1\n")
    new = make(home / "ComfyUI-b", "0.33.0", "torchsde\nav>=16\ncomfy-kitchen==0.2.31\ncomfy-aimdo==0.4.13\nsame==1\n")
    assert install.own_packages(old, new) == ["comfy-kitchen==0.2.16", "comfy-aimdo==0.4.10"]
    assert install.own_packages(new, new) == []


def test_a_version_that_comfyui_asks_for_goes_before_ours(home, monkeypatch):
    (comfy_paths.ROOT).mkdir(parents=True)
    (comfy_paths.ROOT / "constraints.txt").write_text("comfy-kitchen==0.2.31\neinops==0.8.2\n", encoding="utf-8")
    monkeypatch.setattr(install, "ROOT", comfy_paths.ROOT)
    monkeypatch.setattr(sys, "prefix", str(home))
    newer = make(home / "ComfyUI", "0.46.0", "comfy-kitchen==0.3.0\neinops\n")
    lines = install.write_constraints(newer).read_text(encoding="utf-8").splitlines()
    assert ("einops==0.8.2" in lines) == (sys.version_info >= (3, 11))
    assert not any(line.startswith("comfy-kitchen") for line in lines)


def test_everyday_tests_take_the_oldest_and_the_newest():
    paths = [Path(name) for name in ("0.8.0", "0.27.0", "0.33.0")]
    assert comfy_paths.ends(paths) == [Path("0.8.0"), Path("0.33.0")]
    assert comfy_paths.ends(paths[:1]) == [Path("0.8.0")]
    assert comfy_paths.ends([]) == []


def test_supported_versions_agree():
    oldest = ".".join(map(str, comfy_paths.OLDEST))
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-comfyui = ">={oldest}"' in text
    assert comfy_paths.OLDEST <= comfy_paths.NEWEST_TESTED
    assert comfy_paths.CLONE_TAG == "v0.33.0"
