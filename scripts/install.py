"""Install what the quickstart and the tests need into the Python environment that runs this module.

It uses the standard library alone, because it runs before anything is installed. A stamp file in the environment makes
a second run return at once.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from scripts import comfy_paths
from scripts.comfy_paths import ROOT

CLONE_DEADLINE = 60.0
QUICKSTART = ("Pillow", "psutil")
"""Packages that the quickstart imports and the extension does not."""
LOWEST = ROOT / "constraints-lowest.txt"
"""The lowest versions that ``requirements.txt`` allows, and what else the tests have run with beside them."""
NOT_NEEDED = re.compile(r"(torch|torchvision|torchaudio|comfyui-[a-z-]+)\b(?!-)")
"""ComfyUI's requirements that are not installed.

``write_constraints`` chooses torch, and ``comfyui_requirements`` adds torchvision without a version. The API works
without the packages of the web page. torchaudio, which only audio nodes need, is not built for every torch.
"""

TEMPLATES = "0.1.123"
"""The version of ComfyUI's official templates that the tests run, of ``comfyui-workflow-templates`` 0.11.97."""


def pip(*arguments: str) -> None:
    """Run ``pip install`` with some arguments.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def write_constraints(comfyui: Path | None) -> Path:
    """Write ``constraints.txt`` into the environment, with an installed torch and the torchvision that matches it.

    A version that the ComfyUI asks for goes before the file's. Many of the file's versions need Python 3.11: for 3.10
    pip takes the newest that there are.
    """
    suits = sys.version_info >= (3, 11)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if suits else []
    wanted = pinned(comfyui) if comfyui else {}
    lines = [line for line in lines if line.split("==")[0] not in wanted]
    if importlib.util.find_spec("torch") is not None:
        version = importlib.metadata.version("torch").split("+")[0]
        minor = int(version.split(".")[1])
        lines = [line for line in lines if not re.match(r"torch(vision)?==", line)]
        lines += [f"torch=={version}", f"torchvision==0.{minor + 15}.*"]
    file = Path(sys.prefix) / "parallel-dit-constraints.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def comfyui_requirements(comfyui: Path) -> list[str]:
    """The requirements of a ComfyUI without those in ``NOT_NEEDED``, and torchvision."""
    lines = (comfyui / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line.split("#")[0].strip() for line in lines]
    return [line for line in requirements if line and not NOT_NEEDED.match(line)] + ["torchvision"]


def pinned(comfyui: Path) -> dict[str, str]:
    """The packages of which a ComfyUI takes one version alone, as ``{"comfy-kitchen": "0.2.31"}``."""
    exact = (re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in comfyui_requirements(comfyui))
    return {match[1]: match[2] for match in exact if match}


def own_packages(comfyui: Path, newest: Path) -> list[str]:
    """The requirements of a ComfyUI that contradict those of the newest one, whose packages the environment has."""
    others = pinned(newest)
    return [f"{name}=={version}" for name, version in pinned(comfyui).items() if others.get(name, version) != version]


def packages_folder(comfyui: Path) -> Path:
    """The folder of a ComfyUI's own packages, which has to come first on its path; often there is none."""
    return Path(sys.prefix) / "comfyuis" / comfy_paths.version(comfyui)


def install_own_packages(comfyui: Path, newest: Path) -> None:
    """Install what a ComfyUI cannot share with the newest one, outside of the environment's packages."""
    shutil.rmtree(packages_folder(comfyui), ignore_errors=True)
    if packages := own_packages(comfyui, newest):
        pip("--no-deps", "--target", str(packages_folder(comfyui)), *packages)


def missing(comfyui: Path) -> list[str]:
    """The packages that a ComfyUI needs and that are not installed."""
    names = [re.split(r"[^\w.-]", line)[0] for line in comfyui_requirements(comfyui)]
    installed = {_normalised(distribution.name) for distribution in importlib.metadata.distributions()}
    return [name for name in names if _normalised(name) not in installed]


def _normalised(name: str) -> str:
    """A package's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def frontend_version(comfyui: Path) -> str:
    """The version of the web page that a ComfyUI requires.

    Raises:
        ValueError: its requirements do not pin one.
    """
    text = (comfyui / "requirements.txt").read_text(encoding="utf-8")
    match = re.search(r"^comfyui-frontend-package==(\S+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{comfyui}/requirements.txt does not pin comfyui-frontend-package")
    return match.group(1)


def frontend_folder(comfyui: Path) -> Path:
    """The folder of a ComfyUI's web page, which ``install_frontend`` creates."""
    return Path(sys.prefix) / "frontends" / frontend_version(comfyui) / "comfyui_frontend_package" / "static"


def install_frontend(comfyui: Path) -> None:
    """Install a ComfyUI's web page outside of the environment's packages, so that several versions can coexist."""
    folder = frontend_folder(comfyui)
    if not folder.is_dir():
        package = f"comfyui-frontend-package=={frontend_version(comfyui)}"
        pip("--no-deps", "--target", str(folder.parent.parent), package)


def templates_folder() -> Path:
    """The folder of ComfyUI's official templates, which ``install_templates`` creates."""
    return Path(sys.prefix) / "templates" / TEMPLATES / "comfyui_workflow_templates_json" / "templates"


def install_templates() -> None:
    """Install ComfyUI's official templates outside of the environment's packages, without their pictures."""
    folder = templates_folder()
    if not folder.is_dir():
        pip("--no-deps", "--target", str(folder.parent.parent), f"comfyui-workflow-templates-json=={TEMPLATES}")


def clone_comfyui() -> Path | None:
    """Clone ComfyUI into the cache folder. If that fails, print the reason and return None."""
    target = comfy_paths.cache_folder()
    print(f"No ComfyUI found: cloning {comfy_paths.CLONE_TAG} into {target} ...", flush=True)
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", comfy_paths.CLONE_TAG, comfy_paths.CLONE_URL]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([*command, str(target)], check=True, timeout=CLONE_DEADLINE)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(target, ignore_errors=True)
        print(f"ComfyUI could not be cloned: {error}")
        return None
    return target


def install(comfyuis: list[Path], *, dev: bool, lowest: bool) -> None:
    """Install with one call of pip, which resolves all requirements together. An installed torch is kept.

    Of what two ComfyUIs want in different versions, each older one gets its own.
    """
    newest = max(comfyuis, key=comfy_paths.release, default=None)
    own = {path: own_packages(path, newest) for path in comfyuis if newest}
    packages = [line for path in comfyuis for line in comfyui_requirements(path) if line not in own[path]]
    files = ["requirements.txt", *(["requirements-dev.txt"] if dev else [])]
    pip(
        "-c",
        str(LOWEST if lowest else write_constraints(newest)),
        *[f"-r{ROOT / name}" for name in files],
        *dict.fromkeys([*QUICKSTART, *packages]),
    )
    for path in own:
        install_own_packages(path, newest or path)
        if dev and not lowest:
            install_frontend(path)
    if dev and comfyuis and not lowest:
        install_templates()


def stamp(comfyuis: list[Path], *, dev: bool) -> str:
    """A digest of every file that an installation depends on."""
    files = [ROOT / name for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt", LOWEST.name)]
    files += [path / "requirements.txt" for path in comfyuis]
    digest = hashlib.sha256(Path(__file__).read_bytes() + bytes([dev]))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find_comfyuis(*, dev: bool, lowest: bool = False) -> list[Path]:
    """The ComfyUIs to install for: for the tests all, for the quickstart the first; a clone if there are none.

    For the lowest versions it is the oldest, since newer ones ask for newer packages.
    """
    for path in comfy_paths.checkouts():
        if not comfy_paths.is_new_enough(path):
            oldest = ".".join(map(str, comfy_paths.OLDEST))
            print(f"Skipping ComfyUI {comfy_paths.version(path)} in {path}: {oldest} is the oldest version that works.")
    if lowest:
        return comfy_paths.oldest()
    comfyuis = comfy_paths.candidates()
    if not comfyuis and not comfy_paths.are_named() and (clone := clone_comfyui()):
        comfyuis = [clone]
    return comfyuis if dev else comfyuis[:1]


def install_and_stamp(comfyuis: list[Path], stamp_file: Path, *, dev: bool, lowest: bool = False) -> None:
    """Install, unless ``stamp_file`` shows that nothing has changed since the last installation.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    current = stamp(comfyuis, dev=dev)
    if stamp_file.exists() and stamp_file.read_text() == current:
        return
    print("Installing into the virtual environment (the first time takes a few minutes) ...", flush=True)
    started = time.monotonic()
    install(comfyuis, dev=dev, lowest=lowest)
    stamp_file.write_text(current)
    print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)


def install_with_fallback(comfyuis: list[Path], stamp_file: Path, *, dev: bool, lowest: bool) -> None:
    """Install; if that fails without ``dev``, install without ComfyUI.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    try:
        install_and_stamp(comfyuis, stamp_file, dev=dev, lowest=lowest)
    except subprocess.CalledProcessError:
        if dev or not comfyuis:
            raise
        print(f"The requirements of ComfyUI in {comfyuis[0]} could not be installed: continuing without ComfyUI.")
        install_and_stamp([], stamp_file, dev=dev)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dev", action=argparse.BooleanOptionalAction, help="also install what the checks and the tests need"
    )
    parser.add_argument(
        "--lowest", action="store_true", help="install the lowest versions, for the oldest ComfyUI that is found"
    )
    arguments = parser.parse_args()
    dev, lowest = bool(arguments.dev), bool(arguments.lowest)
    comfyuis = find_comfyuis(dev=dev, lowest=lowest)
    stamp_file = Path(sys.prefix) / f"parallel-dit-{'dev' if dev else 'run'}.stamp"
    try:
        install_with_fallback(comfyuis, stamp_file, dev=dev, lowest=lowest)
    except subprocess.CalledProcessError:
        raise SystemExit("The requirements could not be installed; see pip's messages above.") from None


if __name__ == "__main__":
    main()
