# Sourced by quickstart.sh and test.sh: create .venv, install into it, and activate it. Its arguments go to install.py.
# With --lowest among them it is .venv-lowest.
# Source it with at least one argument: without any, bash passes on those of the calling script.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment="$PWD/.venv"
needed="Python 3.10 or newer"
suitable='import sys; sys.exit(sys.version_info < (3, 10))'
case " $* " in
*" --lowest "*)
    environment="$PWD/.venv-lowest"
    needed="Python 3.11 or 3.12"
    suitable='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' # the lowest numpy has no wheel for 3.13
    ;;
esac
# All bytecode goes into the environment: ComfyUI checkouts stay clean, and later runs do not compile again.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$environment/bytecode"
# Checks for pip too: without Debian's python3-venv a failed attempt leaves a folder with bin/python and no pip.
if ! { "$environment/bin/python" -c "$suitable" && "$environment/bin/python" -m pip --version; } >/dev/null 2>&1; then
    python="${PYTHON:-python3}"
    "$python" -c "$suitable" 2>/dev/null ||
        { echo "$needed is needed, and $python is missing or another version: set PYTHON to one that fits."; exit 1; }
    "$python" -m venv --clear "$environment" ||
        { echo "$python cannot create virtual environments: install its venv module (Debian: apt install python3-venv)."; exit 1; }
fi
"$environment/bin/python" -m scripts.install "$@"
export PATH="$environment/bin:$PATH" VIRTUAL_ENV="$environment"
