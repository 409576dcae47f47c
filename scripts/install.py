"""Install what the quickstart and the tests need into the Python environment that runs this.

Standard library only: it runs before anything is installed. A stamp file lets a second run do nothing.
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
"""What the quickstart imports and the extension does not."""
NOT_NEEDED = re.compile(r"(torch|torchvision|torchaudio|comfyui-[a-z-]+)\b(?!-)")
"""ComfyUI's requirements that are left out: torch is chosen here, and the API answers without the packages of
its web page. torchaudio has no build for every torch; ComfyUI then only lacks its audio nodes."""


def pip(*arguments: str) -> None:
    """Run ``pip install``.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def write_constraints() -> Path:
    """The constraints file, except that a torch which is installed already stays (torchvision goes with it)."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if importlib.util.find_spec("torch") is not None:
        version = importlib.metadata.version("torch").split("+")[0]
        minor = int(version.split(".")[1])
        lines = [line for line in lines if not re.match(r"torch(vision)?==", line)]
        lines += [f"torch=={version}", f"torchvision==0.{minor + 15}.*"]
    file = Path(sys.prefix) / "parallel-dit-constraints.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def comfyui_requirements(comfyui: Path) -> list[str]:
    """What a ComfyUI needs: its requirements without those in ``NOT_NEEDED``, and torchvision."""
    lines = (comfyui / "requirements.txt").read_text(encoding="utf-8").splitlines()
    kept = [line.split("#")[0].strip() for line in lines]
    return [line for line in kept if line and not NOT_NEEDED.match(line)] + ["torchvision"]


def missing(comfyui: Path) -> list[str]:
    """The packages that a ComfyUI needs and this Python environment lacks."""
    names = [re.split(r"[^\w.-]", line)[0] for line in comfyui_requirements(comfyui)]
    present = {re.sub(r"[-_.]+", "-", found.name).lower() for found in importlib.metadata.distributions()}
    return [name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in present]


def frontend_version(comfyui: Path) -> str:
    """The version of the web page that a ComfyUI asks for."""
    text = (comfyui / "requirements.txt").read_text(encoding="utf-8")
    found = re.search(r"^comfyui-frontend-package==(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{comfyui}/requirements.txt pins no comfyui-frontend-package")
    return found.group(1)


def frontend_folder(comfyui: Path) -> Path:
    """Where the web page of a ComfyUI lies once ``install_frontend`` has run."""
    return Path(sys.prefix) / "frontends" / frontend_version(comfyui) / "comfyui_frontend_package" / "static"


def install_frontend(comfyui: Path) -> None:
    """Unpack the web page beside the environment's packages, so that two versions can lie side by side."""
    folder = frontend_folder(comfyui)
    if not folder.is_dir():
        package = f"comfyui-frontend-package=={frontend_version(comfyui)}"
        pip("--no-deps", "--target", str(folder.parent.parent), package)


def clone_comfyui() -> Path | None:
    """Clone ComfyUI into the cache folder; None (and the reason printed) if that does not work."""
    target = comfy_paths.cache_folder()
    print(f"No ComfyUI found; cloning {comfy_paths.CLONE_TAG} into {target} ...", flush=True)
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", comfy_paths.CLONE_TAG, comfy_paths.CLONE_URL]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([*command, str(target)], check=True, timeout=CLONE_DEADLINE)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(target, ignore_errors=True)
        print(f"ComfyUI could not be cloned: {error}")
        return None
    return target


def install(comfyuis: list[Path], *, dev: bool) -> None:
    """Install everything in one go, so that pip sees all demands together; a torch that is there stays."""
    wanted = [argument for path in comfyuis for argument in comfyui_requirements(path)]
    files = ["requirements.txt", *(["requirements-dev.txt"] if dev else [])]
    pip("-c", str(write_constraints()), *[f"-r{ROOT / name}" for name in files], *dict.fromkeys([*QUICKSTART, *wanted]))
    if dev:
        for path in comfyuis:
            install_frontend(path)


def stamp(comfyuis: list[Path], *, dev: bool) -> str:
    """What an installation depends on, as one digest."""
    files = [ROOT / name for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt")]
    files += [path / "requirements.txt" for path in comfyuis]
    digest = hashlib.sha256(Path(__file__).read_bytes() + bytes([dev]))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find_comfyuis(*, dev: bool) -> list[Path]:
    """The ComfyUIs to install for: all for the tests, the first for the quickstart, a clone where there is none."""
    for path in comfy_paths.checkouts():
        if not comfy_paths.is_new_enough(path):
            oldest = ".".join(map(str, comfy_paths.OLDEST))
            print(f"ComfyUI {comfy_paths.version(path)} in {path} is left out: {oldest} or newer is needed.")
    found = comfy_paths.candidates()
    if not found and not comfy_paths.are_named() and (clone := clone_comfyui()):
        found = [clone]
    return found if dev else found[:1]


def install_and_stamp(comfyuis: list[Path], done: Path, *, dev: bool) -> None:
    """``install``, unless the stamp ``done`` says that nothing has changed since the last time.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    wanted = stamp(comfyuis, dev=dev)
    if done.exists() and done.read_text() == wanted:
        return
    print("Installing into the virtual environment (a few minutes at the first time) ...", flush=True)
    started = time.monotonic()
    install(comfyuis, dev=dev)
    done.write_text(wanted)
    print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action=argparse.BooleanOptionalAction, help="also what the checks and the tests need")
    dev = bool(parser.parse_args().dev)
    comfyuis = find_comfyuis(dev=dev)
    done = Path(sys.prefix) / f"parallel-dit-{'dev' if dev else 'run'}.stamp"
    try:
        try:
            install_and_stamp(comfyuis, done, dev=dev)
        except subprocess.CalledProcessError:
            if dev or not comfyuis:
                raise
            print(f"The requirements of ComfyUI in {comfyuis[0]} could not be installed: going on without it.")
            install_and_stamp([], done, dev=dev)
    except subprocess.CalledProcessError:
        raise SystemExit("The requirements could not be installed; pip says above why.") from None


if __name__ == "__main__":
    main()
