#!/usr/bin/env bash
# Check everything: bash scripts/test.sh. With --quick, what needs a few minutes; with --grid, every family and VAE in
# every layout with every ComfyUI, which takes long; a second argument chooses tests of the grid, as pytest's -k does.
# With --lowest, unit tests and prompts with the lowest versions that requirements.txt allows, in .venv-lowest.
# With --lf, what failed when all parts last ran. Other arguments go to pytest alone.
set -euo pipefail
options=(--dev)
if [ "$*" = --lowest ]; then options+=(--lowest); fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "${options[@]}"
export OMP_NUM_THREADS=1
if python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then
    export PYTHONPATH="$PWD/scripts/cpu_shim"
fi

notes() { # where a part notes what failed: of parts that run side by side, one would overwrite the other's notes
    echo "-o cache_dir=.venv/pytest/$1"
}

failed_last() {
    local part failed=
    for part in contract units lab inside rest; do
        if grep -qs true ".venv/pytest/$part/v/cache/lastfailed"; then pytest $(notes $part) --lf || failed=1; fi
    done
    [ -z "$failed" ]
}

style() {
    ruff check .
    ruff format --check .
}

structure() { # types, import layers, and what the nodes rely on in each ComfyUI
    local failed=
    # nodes/ imports the backend relatively, so both tools need the checkout as a package, whatever its folder's name.
    local package_path="$PWD/.venv/as_package"
    mkdir -p "$package_path" && ln -sfn "$PWD" "$package_path/parallel_dit"
    mypy || failed=1
    MYPYPATH="$package_path" mypy -p parallel_dit.nodes || failed=1
    PYTHONPATH="$package_path" lint-imports || failed=1
    pytest $(notes contract) tests/unit/scripts "$@" || failed=1
    [ -z "$failed" ]
}

low_priority() { # for the rest of a job
    renice -n 10 "$BASHPID" >/dev/null
}

beside() { # Run a function beside what follows; joined() waits, prints its output and gives its status.
    report=$(mktemp)
    set -m # gives the job a process group of its own, which the trap ends
    "$@" >"$report" 2>&1 &
    set +m
    trap 'kill -- -$! 2>/dev/null || true; rm -f "$report"*' EXIT
}

joined() {
    local status=0
    wait $! || status=1
    cat "$report"
    trap - EXIT
    rm -f "$report"*
    return $status
}

install_chromium() {
    if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Chromium for the browser tests ..."
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null ||
            echo "Chromium could not be installed; the browser tests will be skipped."
    fi
}

other_half() { # of what quick runs, for the second core
    local failed=
    low_priority
    structure --ignore tests/unit/scripts/test_synchronisations.py || failed=1
    pytest $(notes lab) tests/unit/lab || failed=1
    python -m lab verify --family flux --variant dev --layout ulysses=2 || failed=1
    [ -z "$failed" ]
}

quick() { # with one ComfyUI, and without counting where the host waits, which takes a minute
    local failed=
    COMFYUI_PATHS="$(python -c 'from scripts import comfy_paths; print(*comfy_paths.candidates()[:1])')"
    export COMFYUI_PATHS
    style
    beside other_half
    pytest $(notes units) tests/unit --ignore tests/unit/scripts --ignore tests/unit/lab || failed=1
    joined || failed=1
    [ -z "$failed" ]
}

INSIDE=tests/comfyui/test_nodes_inside.py

background() { # what takes longest, and what does not mind to wait for cores: the rest often leaves one or both idle
    local failed= inside="$report.inside"
    pytest $(notes inside) "$INSIDE" >"$inside" 2>&1 & # one ComfyUI after the other: each takes several GB
    low_priority
    structure || failed=1
    pytest $(notes units) tests/unit tests/ranks --ignore tests/unit/scripts --durations 40 --durations-min 3 ||
        failed=1
    wait $! || failed=1
    cat "$inside"
    [ -z "$failed" ]
}

everything() {
    local failed=
    style
    beside background
    pytest $(notes rest) --ignore "$INSIDE" --ignore tests/unit --ignore tests/ranks --durations 40 --durations-min 3 \
        -m "everyday or not machines" || failed=1
    python -m lab verify --ci || failed=1
    joined || failed=1
    [ -z "$failed" ]
}

lowest() { # Unit tests alone do not see that no rank starts.
    COMFYUI_PATHS="$(python -c 'from scripts import comfy_paths; print(*comfy_paths.oldest())')"
    export COMFYUI_PATHS
    pytest tests/unit tests/comfyui/test_quickstart.py --ignore tests/unit/scripts
}

case "$*" in
--quick) quick ;;
--lowest) lowest ;;
--grid*) PARALLEL_DIT_GRID="${2:-}" pytest -m grid tests/comfyui ;;
--lf) failed_last ;;
--long) pytest -m long ;;
"") install_chromium && everything ;;
*) install_chromium && pytest "$@" ;;
esac
