#!/usr/bin/env bash
# From a fresh clone to an image and a video made by two ranks: bash scripts/quickstart.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" --no-dev
exec python -m scripts.quickstart "$@"
