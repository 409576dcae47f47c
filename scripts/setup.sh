# Sourced by quickstart.sh and test.sh: create .venv, install into it, and activate it. Its arguments go to install.py.
# Source it with at least one argument: without any, bash passes on those of the calling script.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# All bytecode goes into the environment: ComfyUI checkouts stay clean, and later runs do not compile again.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv/bytecode"
new_enough='import sys; sys.exit(sys.version_info < (3, 11))' # the versions in constraints.txt need 3.11
# Checks for pip too: without Debian's python3-venv a failed attempt leaves a folder with bin/python and no pip.
if ! { .venv/bin/python -c "$new_enough" && .venv/bin/python -m pip --version; } >/dev/null 2>&1; then
    python="${PYTHON:-python3}"
    "$python" -c "$new_enough" 2>/dev/null ||
        { echo "Python 3.11 or newer is needed, and $python is missing or older: set PYTHON to a newer one."; exit 1; }
    "$python" -m venv --clear .venv ||
        { echo "$python cannot create virtual environments: install its venv module (Debian: apt install python3-venv)."; exit 1; }
fi
.venv/bin/python -m scripts.install "$@"
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
