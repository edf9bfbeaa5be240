"""A release: its notes are the changelog's section, and its workflow stops where the tag is another version."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import lightning_recsys

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "scripts" / "release_notes.sh"
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- Two things. `[0.1.0]` had one.

## [0.1.0]

- One thing.
"""


def notes(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NOTES, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def changelog(tmp_path):
    path = tmp_path / "CHANGELOG.md"
    path.write_text(CHANGELOG)
    return path


def test_notes_then_are_the_section_of_the_version_alone(changelog):
    assert notes("0.2.0", changelog).stdout == "\n### Added\n\n- Two things. `[0.1.0]` had one.\n"
    assert notes("0.1.0", changelog).stdout == "\n- One thing.\n"


@pytest.mark.parametrize("version", ["Unreleased", "0.2", "0.3.0"])
def test_notes_when_a_version_has_no_section_or_an_empty_one_then_say_so(changelog, version):
    done = notes(version, changelog)
    assert done.returncode == 1
    assert f"has nothing about version {version}" in done.stderr
    assert not done.stdout


def test_notes_then_the_changelog_has_those_of_this_version_and_a_place_for_the_next():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d{2}-\d{2})?$", changelog, flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", lightning_recsys.__version__]
    assert "### " in notes(lightning_recsys.__version__).stdout


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("CITATION.cff", r"^version: (.+)$"),
        ("examples/kubernetes/servers.yaml", r"image: .*lightning-recsys:(.+)$"),
        ("examples/kubernetes/train.yaml", r"image: .*lightning-recsys:(.+)$"),
        ("docs/clusters.md", r"registry.example.com/lightning-recsys:([\d.]+\d)"),
    ],
)
def test_version_then_every_file_that_names_it_has_the_same(path, pattern):
    found = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found
    assert set(found) == {lightning_recsys.__version__}


@pytest.mark.parametrize(("tag", "code"), [(f"v{lightning_recsys.__version__}", 0), ("v99.0.0", 1)])
def test_workflow_when_the_tag_is_another_version_then_its_first_command_fails(tag, code):
    first = next(step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "run" in step)
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    assert subprocess.run(["bash", "-ec", first], cwd=ROOT, env=environment, check=False).returncode == code


def test_workflow_then_publishing_waits_for_the_build_and_has_the_least_rights():
    jobs = WORKFLOW["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["notes"]["needs"] == "publish"
    assert any("scripts/release_notes.sh" in step.get("run", "") for step in jobs["build"]["steps"])
