#!/usr/bin/env bash
# Build the documentation's site from docs/ into site/: ./scripts/docs.sh [zensical's arguments]. Without arguments it builds
# strictly: a dead link, a heading that is not there, or a name of the reference that is not there is an error.
#   ./scripts/docs.sh serve     builds, answers on http://localhost:8000, and builds again when a page changes
# The first call installs everything into .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
[ $# -gt 0 ] || set -- build --clean --strict
export PYTHONPATH=$root/scripts/site${PYTHONPATH:+:$PYTHONPATH} # the Markdown extension that zensical.toml names
exec "$venv_python" -m zensical "$@"
