# Sourced by quickstart.sh and test.sh: make .venv, install into it, and put it in charge. Arguments go to install.py,
# and there has to be one: without any, bash hands on those of the caller.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# All bytecode goes into the environment: a ComfyUI checkout stays as it was, and no process compiles anew.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv/bytecode"
new_enough='import sys; sys.exit(sys.version_info < (3, 11))' # what constraints.txt needs
# Without Debian's python3-venv a folder is left behind that has a bin/python and no pip.
if ! { .venv/bin/python -c "$new_enough" && .venv/bin/python -m pip --version; } >/dev/null 2>&1; then
    python="${PYTHON:-python3}"
    "$python" -c "$new_enough" 2>/dev/null ||
        { echo "Python 3.11 or newer is needed, and $python is missing or older: set PYTHON to a newer one."; exit 1; }
    "$python" -m venv --clear .venv ||
        { echo "$python needs its venv module, which makes virtual environments (Debian: apt install python3-venv)."; exit 1; }
fi
.venv/bin/python -m scripts.install "$@"
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
