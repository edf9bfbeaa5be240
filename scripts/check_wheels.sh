#!/usr/bin/env bash
# Whether every dependency can be had as a wheel for each Python that we say we run on: resolves, and installs nothing.
# Hydra's parser is published as a source alone; it is plain Python, so the wheel that is built of it here fits them all.
# ./scripts/check_wheels.sh [PYTHON_VERSION ...]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
mapfile -t requirements < <("$venv_python" -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')")
"$venv_python" -m pip wheel -q --no-deps --wheel-dir "$target" "antlr4-python3-runtime==4.9.*"
versions=("$@")
[ $# -gt 0 ] || versions=(3.11 3.12 3.13)
for version in "${versions[@]}"; do
    say "Python $version ..."
    "$venv_python" -m pip install -q --dry-run --only-binary=:all: --find-links "$target" --target "$target/installed" --python-version "$version" \
        "torch==$torch_version" "${requirements[@]}"
done
say "every dependency has wheels."
