#!/usr/bin/env bash
# Try on real GPUs what tests only on CPU ranks elsewhere: bash scripts/gpu_check.sh [--part N]. See --help.
# It runs in the Python that has the GPU's torch, and installs nothing: such a machine may have no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m lab gpu-check "$@"
