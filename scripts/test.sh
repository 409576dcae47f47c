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
# With arguments for pytest, those tests alone are wanted.
[ $# -eq 0 ] || exec pytest "$@"
ruff check .
ruff format --check .

beside() { # What needs no ranks runs in the time that the other tests leave.
    renice -n 19 "$BASHPID" >/dev/null
    mypy
    # Only as a package can the checkout's relative imports be followed, whatever its folder is called.
    local package_path="$PWD/.venv/as_package"
    mkdir -p "$package_path" && ln -sfn "$PWD" "$package_path/parallel_dit"
    MYPYPATH="$package_path" mypy -p parallel_dit.nodes
    PYTHONPATH="$package_path" lint-imports
    pytest tests/checkpoint --timeout 1500
}
report=$(mktemp)
set -m # so that it can be ended with all that it has started
beside >"$report" 2>&1 &
set +m
trap 'kill -- -$! 2>/dev/null || true; rm -f "$report"' EXIT
failed=
pytest --ignore tests/checkpoint || failed=1
python -m parallel_backend verify --ci || failed=1
wait $! || failed=1
cat "$report"
[ -z "$failed" ]
