"""Notebooks of examples/notebooks run in a Jupyter kernel as they are, on fewer rows, and draw what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_helpers import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_when_kept_then_has_no_outputs(notebook):
    for cell in code_of(notebook):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_when_run_in_a_kernel_then_every_cell_works_and_the_last_picture_is_drawn(notebook, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    copy = tmp_path / notebook.name
    copy.write_text(notebook.read_text())
    folders = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", str(copy)],
        cwd=tmp_path,
        env={**os.environ, **folders, "EPOCHS": "1", "ROWS": "5000", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in code_of(copy) for output in cell["outputs"]]
    said = "".join("".join(x["text"]) for x in outputs if x["output_type"] == "stream")
    assert sum("image/png" in x.get("data", {}) for x in outputs) == 1, said
    assert "Traceback" not in said, said
