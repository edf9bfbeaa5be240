"""What the command lines of the recipes answer without doing anything: at once, without torch."""

import subprocess
import sys

import pytest
from recipe_helpers import RECIPES

ANSWERS = [(name, "--help") for name in sorted(path.stem for path in RECIPES.glob("[a-z]*.py"))]
ANSWERS += [("train", "-c", "job"), ("train", "model=dlrn"), ("prepare", "schema", "--help")]
# A module that is None here cannot be imported.
WITHOUT = "import runpy, sys; sys.modules.update(dict.fromkeys(['torch', 'pytorch_lightning', 'pyarrow', 'numba']));"
RUN = "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv.pop(0)); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, others) for name, *others in ANSWERS], ids=map(" ".join, ANSWERS)
)
def test_answer_when_there_is_nothing_to_do_then_needs_no_torch(name, arguments, tmp_path):
    line = [sys.executable, "-c", WITHOUT + RUN, str(RECIPES), str(RECIPES / f"{name}.py"), *arguments]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    wrong = "model=dlrn" in arguments
    assert done.returncode == wrong, done.stderr
    assert ("Did you mean dlrm" in done.stderr) if wrong else done.stdout
