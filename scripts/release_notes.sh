#!/usr/bin/env bash
# Print the changelog's section of a version, for the notes of its release: ./scripts/release_notes.sh VERSION [CHANGELOG]
set -euo pipefail
version=${1:?"usage: $0 VERSION [CHANGELOG]"}
changelog=${2:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)/CHANGELOG.md}
notes=$(awk -v heading="## [$version]" '/^## \[/ { found = index($0, heading) == 1; next } found' "$changelog")
if [ -z "${notes//[[:space:]]/}" ]; then
    echo "$changelog has nothing about version $version: give it a section that begins with '## [$version]'." >&2
    exit 1
fi
printf '%s\n' "$notes"
