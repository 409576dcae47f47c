"""Check ComfyUI checkouts against the contract: python -m scripts.core_contract [PATH ...]

Without a path every ComfyUI that is found is checked, of whatever version. Nothing is started or imported.
"""

import argparse
import time
from pathlib import Path

from scripts import comfy_paths
from scripts.core_contract.check import asked, differences
from scripts.core_contract.contract import CONTRACT


def check(comfyui: Path) -> int:
    """Print every difference of a checkout, or one line that there is none; returns how many there are."""
    started = time.monotonic()
    found = list(differences(CONTRACT, comfyui))
    for difference in found:
        print(difference)
    version, count = comfy_paths.version(comfyui), len(asked(CONTRACT, comfyui))
    result = f"{len(found)} differences from" if found else "as in"
    print(f"ComfyUI {version} in {comfyui}: {result} the {count} entries ({time.monotonic() - started:.1f} s).")
    return len(found)


def main() -> None:
    """Run the command; the exit status is 1 if there is a difference."""
    parser = argparse.ArgumentParser(prog="python -m scripts.core_contract", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a ComfyUI checkout (default: all found)")
    paths = parser.parse_args().paths or comfy_paths.checkouts()
    if not paths:
        raise SystemExit("No ComfyUI found: name its folder.")
    for path in paths:
        if not comfy_paths.is_comfyui(path):
            raise SystemExit(f"{path} is no ComfyUI: it has no main.py or no comfyui_version.py.")
    raise SystemExit(1 if sum([check(path) for path in paths]) else 0)


if __name__ == "__main__":
    main()
