#!/usr/bin/env bash
# Check what has changed, at every save: bash scripts/check.sh. It needs 5 to 15 seconds on a calm machine.
# It runs ruff, mypy, and the unit tests of the files that differ from the last commit. With a commit or a branch as its
# argument, as in check.sh main, these are the files that differ from where the two parted.
# mypy keeps a cache, so that it reads again only what has changed and what depends on it. The first run takes a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TEST_SECONDS=12 # for the unit tests
if [ -x .venv/bin/python ]; then PATH="$PWD/.venv/bin:$PATH"; fi
command -v ruff mypy pytest >/dev/null || { echo "ruff, mypy or pytest is missing: bash scripts/test.sh --quick installs them."; exit 1; }
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/scripts/cpu_shim"

changed() { # Python files that are new or differ
    git diff --name-only --diff-filter=d "$(git merge-base HEAD "${1:-HEAD}")" -- '*.py'
    git ls-files --others --exclude-standard -- '*.py'
}

types() {
    local failed=
    mypy || failed=1
    # nodes/ imports the backend relatively, so mypy needs the checkout as a package, whatever its folder's name.
    mkdir -p .venv/as_package && ln -sfn "$PWD" .venv/as_package/parallel_dit
    MYPYPATH="$PWD/.venv/as_package" mypy -p parallel_dit.nodes || failed=1
    [ -z "$failed" ]
}

tests_of() { # files on stdin: the unit tests that changed, and those that are named after a module that changed
    local file folder
    while read -r file; do
        folder=$(dirname "${file#parallel_backend/}")
        case "$file" in
        tests/unit/*/test_*.py | tests/unit/test_*.py) echo "$file" ;;
        parallel_backend/* | lab/*) echo "tests/unit/$folder/test_$(basename "$file")" ;;
        esac
    done | sort -u | while read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done
}

ruff check .
ruff format --check --quiet . || { echo "Some files are not formatted: ruff format ."; exit 1; }
failed=
mapfile -t tests < <(changed "$@" | tests_of)
report=$(mktemp)
types >"$report" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null || true; rm -f "$report"' EXIT
if [ ${#tests[@]} -gt 0 ]; then
    status=0
    timeout --kill-after 3 "$TEST_SECONDS" pytest -q -x "${tests[@]}" || status=$?
    case $status in
    0 | 5) ;;
    124 | 137) echo "NOT FINISHED in $TEST_SECONDS s, so run it by hand: pytest ${tests[*]}" ;;
    *) failed=1 ;;
    esac
fi
wait $beside || failed=1
cat "$report"
[ -z "$failed" ]
