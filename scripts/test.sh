#!/usr/bin/env bash
# Run the tests: ./scripts/test.sh [pytest arguments], paths from the repository's root. LIGHTNING_RECSYS_DATA names the
# folder of real data sets; tests that need one are skipped without. The first call installs everything into .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
exec "$venv_python" -m pytest "$@"
