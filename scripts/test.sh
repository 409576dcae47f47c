#!/usr/bin/env bash
# Run all checks and tests: bash scripts/test.sh. With arguments, run pytest with them and nothing else.
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
[ $# -eq 0 ] || exec pytest "$@"
ruff check .
ruff format --check .

beside() { # Checks that need no ranks run at low priority beside the tests.
    renice -n 19 "$BASHPID" >/dev/null
    mypy
    # nodes/ imports the backend relatively, so both tools need the checkout as a package, whatever its folder's name.
    local package_path="$PWD/.venv/as_package"
    mkdir -p "$package_path" && ln -sfn "$PWD" "$package_path/parallel_dit"
    MYPYPATH="$package_path" mypy -p parallel_dit.nodes
    PYTHONPATH="$package_path" lint-imports
    pytest tests/checkpoint --timeout 1500
}
report=$(mktemp)
set -m # gives the job a process group of its own, which the trap ends
beside >"$report" 2>&1 &
set +m
trap 'kill -- -$! 2>/dev/null || true; rm -f "$report"' EXIT
failed=
pytest --ignore tests/checkpoint || failed=1
python -m parallel_backend verify --ci || failed=1
wait $! || failed=1
cat "$report"
[ -z "$failed" ]
