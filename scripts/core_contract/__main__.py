"""Check ComfyUI checkouts against the contract: python -m scripts.core_contract [--types] [PATH ...]

Without a path it checks every ComfyUI that it finds, whatever its version. It neither starts nor imports ComfyUI.
"""

import argparse
import time
from pathlib import Path

from scripts import comfy_paths
from scripts.core_contract.check import asked, differences
from scripts.core_contract.contract import CONTRACT
from scripts.core_contract.typed import messages


def check(comfyui: Path, *, types: bool) -> int:
    """Print every difference of a checkout and one line of summary. Returns the number of differences."""
    started = time.monotonic()
    found = [str(difference) for difference in differences(CONTRACT, comfyui)] + (messages(comfyui) if types else [])
    for difference in found:
        print(difference)
    version, count = comfy_paths.version(comfyui), len(asked(CONTRACT, comfyui))
    seconds = time.monotonic() - started
    where = f"in {count} entries" + (" and to mypy" if types else "")
    print(f"ComfyUI {version} in {comfyui}: {len(found) or 'no'} differences {where} ({seconds:.1f} s).")
    return len(found)


def main() -> None:
    """Run the command. The exit status is 1 if there is any difference."""
    parser = argparse.ArgumentParser(prog="python -m scripts.core_contract", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a ComfyUI checkout (default: all found)")
    parser.add_argument("--types", action="store_true", help="also ask mypy, which takes a minute the first time")
    arguments = parser.parse_args()
    paths = arguments.paths or comfy_paths.checkouts()
    if not paths:
        raise SystemExit("No ComfyUI found: pass the path of a checkout.")
    for path in paths:
        if not comfy_paths.is_comfyui(path):
            raise SystemExit(f"{path} is not a ComfyUI checkout: it needs a main.py and a comfyui_version.py.")
    raise SystemExit(1 if sum([check(path, types=arguments.types) for path in paths]) else 0)


if __name__ == "__main__":
    main()
