#!/usr/bin/env bash
# Train a model: ./scripts/train.sh [hydra overrides], for example ./scripts/train.sh model=deepfm strategy=ddp
# The first call installs everything into .venv (scripts/_env.sh).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$venv_python" "$root/recipes/train.py" "$@"
