"""The Dockerfile, which is built in the public CI alone: the folders, extras and commands that it names are there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import torch
import yaml

from lightning_recsys.cli import RECIPES, TOOLS

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_dockerfile_when_it_copies_then_the_files_are_there():
    copied = [name for line in re.findall(r"^COPY (.*)$", DOCKERFILE, flags=re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "setup.py", "conf", "recipes", "lightning_recsys"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert set(copied).isdisjoint(ignored)


def test_dockerfile_when_it_installs_then_torch_extra_and_command_are_the_project_s():
    (version,) = re.findall(r"torch==([\d.]+)\+cpu", DOCKERFILE)
    assert version == torch.__version__.partition("+")[0]
    (extra,) = re.findall(r"/source\[(\w+)\]", DOCKERFILE)
    assert extra in PROJECT["optional-dependencies"]
    (entry,) = re.findall(r'^ENTRYPOINT \["([\w-]+)"\]$', DOCKERFILE, flags=re.MULTILINE)
    assert entry in PROJECT["scripts"]


def test_image_when_it_is_run_then_its_commands_are_ours():
    workflow = yaml.safe_load((ROOT / ".github/workflows/docker.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    lines = [*DOCKERFILE.splitlines(), *steps]
    runs = [shlex.split(line.lstrip("# "), comments=True) for line in lines if "docker run" in line]
    commands = [words[words.index("lightning-recsys") + 1] for words in runs]
    assert {"train", "server", "serve"} <= set(commands)
    assert set(commands) <= {*RECIPES, *TOOLS}
