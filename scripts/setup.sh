# Sourced by quickstart.sh and test.sh: make .venv, install into it, and put it in charge. Arguments go to install.py.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    python3 -m venv .venv || { echo "python3 with the venv module is needed (Debian: apt install python3-venv)"; exit 1; }
fi
.venv/bin/python -m scripts.install "$@"
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
