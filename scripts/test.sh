#!/usr/bin/env bash
# Every check: bash scripts/test.sh [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" --dev
export OMP_NUM_THREADS=1
if python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then
    export PYTHONPATH="$PWD/scripts/cpu_shim"
fi
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing Chromium for the browser tests ..."
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null ||
        echo "Chromium could not be installed; the browser tests will be skipped."
fi
ruff check .
ruff format --check .
# Only as a package can the checkout's relative imports be followed, whatever its folder is called.
package_path="$PWD/.venv/as_package"
mkdir -p "$package_path" && ln -sfn "$PWD" "$package_path/parallel_dit"
mypy & of_the_rest=$! ill_typed=  # two at a time: each is one thread
MYPYPATH="$package_path" mypy -p parallel_dit.nodes --cache-dir .mypy_cache/nodes || ill_typed=1
wait "$of_the_rest" || ill_typed=1
[ -z "$ill_typed" ]
PYTHONPATH="$package_path" lint-imports
pytest "$@"
# With arguments for pytest, those tests alone are wanted.
[ $# -gt 0 ] || python -m parallel_backend verify --ci
