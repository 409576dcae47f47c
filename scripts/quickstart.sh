#!/usr/bin/env bash
# Make an image and a video with two ranks, from a fresh clone: bash scripts/quickstart.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" --no-dev
exec python -m scripts.quickstart "$@"
