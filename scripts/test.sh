#!/usr/bin/env bash
# Run the tests: ./scripts/test.sh [pytest arguments], paths from the repository's root. LIGHTNING_RECSYS_DATA names the
# folder of real data sets; tests that need one are skipped without. The first call installs everything into .venv.
# All of them, without arguments, run three files at a time, on two CPUs as well: many wait for other processes to start,
# answer or end, and use one CPU or none meanwhile.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
unset PYTHONDONTWRITEBYTECODE # a hundred processes are started, each of which would compile this package again
[ $# -gt 0 ] || set -- --numprocesses=3 --dist=loadfile --no-loadscope-reorder
exec "$venv_python" -m pytest "$@"
