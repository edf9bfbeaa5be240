#!/usr/bin/env bash
# Whether every dependency can be had as a wheel for each Python that we say we run on: resolves, downloads nothing large,
# installs nothing. ./scripts/check_wheels.sh [PYTHON_VERSION ...]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
mapfile -t requirements < <("$venv_python" -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')")
versions=("$@")
[ $# -gt 0 ] || versions=(3.11 3.12 3.13)
for version in "${versions[@]}"; do
    say "Python $version ..."
    "$venv_python" -m pip install -q --dry-run --only-binary=:all: --target "$target" --python-version "$version" \
        "torch==$torch_version" "${requirements[@]}"
done
say "every dependency has wheels."
