"""Imports point down only; the library never sees recipes, Hydra or the tests; what is public says what it is."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import lightning_recsys

PACKAGE = Path(lightning_recsys.__file__).parent
# Highest first. A package may import from itself and from what stands below it.
LAYERS = (
    "strategies",
    "launchers",
    "tasks",
    "callbacks",
    "models",
    "data",
    "metrics",
    "checkpoints",
    "parameter_server",
    "embeddings",
    "optim",
    "placement",
    "sync",
    "runtime",
    "errors",
    "__about__",
)
NOT_FOR_THE_LIBRARY = {"recipes", "recipe_tools", "conf", "tests", "hydra", "omegaconf", "lightning"}


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import in a file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def upward_imports(path: Path, package: Path) -> list[str]:
    """Imports of a layer above the file's own, and of what no layer may import."""
    own = path.relative_to(package).parts[0].removesuffix(".py")
    wrong = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if top in NOT_FOR_THE_LIBRARY:
            wrong.append(f"{path}:{line} imports {name}")
        elif top == "lightning_recsys" and own != "__init__" and LAYERS.index(layer) < LAYERS.index(own):
            wrong.append(f"{path}:{line} imports {name}, a layer above {own}")
    return wrong


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_when_parsed_then_imports_point_down_only(path):
    assert upward_imports(path, PACKAGE) == []


def test_every_layer_when_listed_then_has_its_place():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert rooms <= set(LAYERS), "a new package or module needs its place in LAYERS"


@pytest.mark.parametrize(
    ("own", "source", "wrong"),
    [
        ("models/fm.py", "from lightning_recsys.embeddings import SparseFeatures", False),
        ("models/fm.py", "from lightning_recsys.tasks.ctr import CTRTask", True),
        ("models/fm.py", "def f():\n    import lightning_recsys.strategies.ddp", True),
        ("models/fm.py", "from recipes import train", True),
        ("models/fm.py", "from omegaconf import DictConfig", True),
        ("models/fm.py", "import lightning.pytorch as pl", True),
        ("models/fm.py", "import pytorch_lightning as pl", False),
        ("optim/sgd.py", "from lightning_recsys import embeddings", True),
    ],
)
def test_checker_when_given_an_import_then_judges_it(tmp_path, own, source, wrong):
    path = tmp_path / own
    path.parent.mkdir()
    path.write_text(source)
    assert bool(upward_imports(path, tmp_path)) == wrong


PACKAGES = [x.name for x in pkgutil.walk_packages([str(PACKAGE)], "lightning_recsys.") if x.ispkg]


@pytest.mark.parametrize("name", ["lightning_recsys", *PACKAGES])
def test_public_name_when_exported_then_is_documented(name):
    package = importlib.import_module(name)
    assert package.__doc__
    names = getattr(package, "__all__", ())  # without it a package exports nothing
    assert len(set(names)) == len(names)
    for public in names:
        value = getattr(package, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"
