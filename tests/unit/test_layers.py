"""Rooms import what they list, downwards; READMEs name every file; what is public says what it is."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import lightning_recsys

PACKAGE = Path(lightning_recsys.__file__).parent
# Highest first: each room with the rooms below it that it imports from. Another edge is a decision, and a line here.
EDGES: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": set(),  # names the modules of its tools, and imports the one that is asked for
    "top": {"monitoring", "parameter_server"},
    "simulation": {
        "compression",
        "data",
        "embeddings",
        "metrics",
        "optim",
        "placement",
        "row_cache",
        "stores",
        "sync",
    },
    "planning": {
        "compression",
        "launchers",
        "monitoring",
        "parameter_server",
        "placement",
        "runtime",
        "strategies",
    },
    "serving": {
        "callbacks",
        "compiled",
        "data",
        "embeddings",
        "errors",
        "launchers",
        "lazy_names",
        "partition",
        "stores",
    },
    "ray": {"checkpoints", "data", "embeddings", "errors", "launchers", "lazy_names", "parameter_server", "strategies"},
    "strategies": {
        "checkpoints",
        "compression",
        "data",
        "embeddings",
        "errors",
        "launchers",
        "lazy_names",
        "models",
        "monitoring",
        "optim",
        "parameter_server",
        "partition",
        "placement",
        "row_cache",
        "runtime",
        "stores",
        "sync",
    },
    "row_cache": {"compiled", "embeddings", "optim", "placement", "stores", "sync"},
    "launchers": {"errors", "lazy_names", "parameter_server", "runtime"},
    "parameter_server": {
        "compression",
        "embeddings",
        "errors",
        "monitoring",
        "optim",
        "runtime",
        "stores",
        "sync",
    },
    "stores": {"compiled", "embeddings", "errors", "optim", "placement", "sync"},
    "tasks": {"callbacks", "checkpoints", "data", "embeddings", "metrics"},
    "callbacks": {"data", "metrics", "monitoring"},
    "models": {"embeddings", "optim", "partition"},
    "partition": {"embeddings", "errors", "placement"},
    "data": {"compiled", "embeddings", "lazy_names", "metrics", "runtime", "sync", "typed_yaml"},
    "embeddings": {"compiled", "optim"},
    "optim": {"compiled", "sync"},
    "checkpoints": {"errors"},
    "placement": {"errors", "typed_yaml"},
    "metrics": set(),
    "monitoring": set(),
    "sync": {"compiled"},
    "compression": {"compiled"},
    "compiled": set(),
    "runtime": set(),
    "errors": set(),
    "lazy_names": set(),
    "typed_yaml": set(),
    "__about__": set(),
}
# Inside the two largest rooms: a file imports from lines below its own, and from nothing beside it or above.
LINES: dict[str, list[str]] = {
    "parameter_server": [
        "cli",
        "processes",
        "server",
        "watched/metrics",
        "handler meetings parts/operators",
        "requests/clients requests/dense requests/dynamic requests/exchange requests/meetings requests/rows",
        "requests/stores access/lease connect",
        "requests/served requests/operations parts/remote_parts remote waiting",
        "client messages/exchange_wire",
        "connections journal parts/operator_wire parts/trained_part requests/checks requests/kept",
        "access/keys access/own_files endpoints messages/sockets messages/wire parts/update_undo watched/counts",
    ],
    "stores": [
        "backend mapped",
        "dense_store dynamic/hash_store dynamic/tables embedding_store",
        "row_files tables",
        "interfaces",
        "dynamic/rows exchange versions",
        "checks digests dynamic/drawing dynamic/key_index exchange_loops plain stripes",
        "folders/counters folders/mapped_arrays",
        "folders/locality folders/room",
    ],
}
# The rooms and files of strategies, highest first, with what each imports: no strategy's room imports another one's.
STRATEGIES: dict[str, set[str]] = {
    "composed": {"async_ps", "common", "ddp", "des", "het", "hierarchical", "parts", "rows", "served", "shadowsync"},
    "async_ps": {"common", "parts", "rows", "served"},
    "ddp": {"common", "rows", "served"},
    "des": {"common"},
    "het": {"common", "parts", "rows", "served"},
    "hierarchical": {"common", "parts", "replicas", "served"},
    "shadowsync": {"common", "parts", "replicas", "served"},
    "served": {"common", "parts", "rows"},
    "replicas": {"common"},
    "rows": {"common", "parts"},
    "common": {"parts"},
    "parts": set(),
}
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


def wrong_imports(path: Path, package: Path) -> list[str]:
    """Imports of rooms that the file's own does not list, and of what no room may import."""
    own = path.relative_to(package).parts[0].removesuffix(".py")
    wrong = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if top in NOT_FOR_THE_LIBRARY:
            wrong.append(f"{path}:{line} imports {name}")
        elif top == "lightning_recsys" and own != "__init__" and layer not in EDGES[own] | {own, "__about__"}:
            wrong.append(f"{path}:{line} imports {name}, and {own} does not list {layer}")
    return wrong


def imports_when_imported(path: Path) -> set[str]:
    """The packages that importing a file imports, whatever its functions import later."""
    found, waiting = set(), [*ast.parse(path.read_text()).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_when_parsed_then_it_imports_what_its_room_lists(path):
    assert wrong_imports(path, PACKAGE) == []


def test_room_when_imported_then_no_extra_is_but_by_serving():
    """Each takes memory in every process that trains (SciPy 63 MiB), and a plain installation has none of them."""
    training = [path for path in MODULES if not path.is_relative_to(PACKAGE / "serving")]
    imported = {path: imports_when_imported(path) for path in training}
    assert all("torch" in imported[PACKAGE / name] for name in ("runtime.py", "data/prepared/rows.py"))
    extras = {"scipy", "matplotlib", "onnx", "onnxscript", "safetensors", "litserve", "torch_geometric"}
    extras |= {"pandas", "prometheus_client"}
    assert not {
        path.relative_to(PACKAGE).as_posix(): found & extras for path, found in imported.items() if found & extras
    }


def test_rooms_when_listed_then_every_edge_points_down_and_is_used():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert rooms == set(EDGES), "a new package or module needs its place in EDGES"
    order = list(EDGES)
    for room, below in EDGES.items():
        assert all(order.index(other) > order.index(room) for other in below), room
        own = [path for path in MODULES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == room]
        used = {name.split(".")[1] for path in own for _, name in imports(path) if name.startswith("lightning_recsys.")}
        assert below <= used, f"{room} lists {below - used}, which it does not import"


def imports_within(path: Path, room: Path, files: set[str]) -> set[str]:
    """The files of its own room that a file imports from; ``__init__`` where it asks the room itself for a name."""
    prefix, found = f"lightning_recsys.{room.name}", set()
    for _, name in imports(path):
        if f"{name}.".startswith(f"{prefix}."):
            parts = name.removeprefix(prefix).strip(".").split(".")
            candidates = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
            found.add(next((x for x in candidates if x in files), "__init__"))
    return found


def wrong_lines(room: Path, lines: list[str]) -> list[str]:
    """Files that the lines do not list, or that are not there, and imports from beside or above."""
    line_of = {name: number for number, line in enumerate(lines) for name in line.split()}
    paths = {path.relative_to(room).with_suffix("").as_posix(): path for path in room.rglob("*.py")}
    files = {name for name in paths if not name.endswith("__init__")}
    wrong = [f"{name} is listed or a file, and not both" for name in sorted(files ^ line_of.keys())]
    for name in sorted(files & line_of.keys()):
        below = {other for other, number in line_of.items() if number > line_of[name]}
        wrong += [f"{name} imports from {x}" for x in sorted(imports_within(paths[name], room, files) - below)]
    return wrong


def test_strategies_then_each_room_imports_what_is_listed_below_it():
    """Names for type checkers alone (``if TYPE_CHECKING``) are no imports: parts know their strategy by name."""
    room, order = PACKAGE / "strategies", list(STRATEGIES)
    for name, listed in STRATEGIES.items():
        paths = [*(room / name).rglob("*.py")] if (room / name).is_dir() else [room / f"{name}.py"]
        used = {
            x.split(".")[2]
            for path in paths
            for x in run_time_imports(path)
            if x.startswith("lightning_recsys.strategies.")
        }
        assert used - {name} == listed
        assert all(order.index(x) > order.index(name) for x in listed)


def run_time_imports(path: Path) -> set[str]:
    """The modules that a file imports from, without those that only a type checker reads."""
    tree = ast.parse(path.read_text())
    blocks = [x for x in ast.walk(tree) if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.dump(x.test)]
    hidden = {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}
    return {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.module and x not in hidden}


@pytest.mark.parametrize("room", LINES)
def test_files_of_a_large_room_then_they_import_from_lines_below(room):
    assert wrong_lines(PACKAGE / room, LINES[room]) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from lightning_recsys.stores.low import x", []),
        ("from lightning_recsys.stores import low", []),
        ("from lightning_recsys.stores.inner.part import x", []),
        ("from lightning_recsys.stores_of_others import x", []),
        ("def f():\n    from lightning_recsys.stores import high", ["middle imports from high"]),
        ("from lightning_recsys.stores.beside import x", ["middle imports from beside"]),
        ("from lightning_recsys.stores import MappedStores", ["middle imports from __init__"]),
    ],
)
def test_lines_when_a_file_imports_then_judged_by_where_it_stands(tmp_path, source, expected):
    room = tmp_path / "stores"
    (room / "inner").mkdir(parents=True)
    for name in ("__init__", "high", "beside", "low", "inner/__init__", "inner/part"):
        (room / f"{name}.py").write_text("from lightning_recsys.stores import high" if name == "__init__" else "")
    (room / "middle.py").write_text(source)
    assert wrong_lines(room, ["high", "middle beside", "low inner/part"]) == expected
    (both,) = set(wrong_lines(room, ["high gone", "middle beside", "low inner/part"])) - set(expected)
    assert both == "gone is listed or a file, and not both"


def test_rooms_when_counted_then_none_has_more_files_than_a_reader_keeps_in_mind():
    sizes = {room.relative_to(PACKAGE).as_posix(): len(list(room.glob("*.py"))) for room in PACKAGE.rglob("*/")}
    assert "strategies/common" in sizes
    assert {room: size for room, size in sizes.items() if size > 15} == {}


ROOMS = [path.parent for path in sorted(PACKAGE.rglob("README.md"))]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(PACKAGE).as_posix())
def test_readme_then_it_names_every_file_of_its_room(room):
    """A folder within it is named as a whole, or has a README of its own."""
    page = (room / "README.md").read_text()
    named = {name for quoted in re.findall(r"`([^`]+)`", page) for name in expanded(quoted)}
    walls = {path for path in room.iterdir() if path.is_dir() and (path / "README.md").exists()}
    for path in room.rglob("*.py"):
        inner = path.relative_to(room)
        if path.name == "__init__.py" or walls & set(path.parents):
            continue
        parents = {f"{parent.as_posix()}/" for parent in inner.parents if parent != Path(".")}
        assert inner.as_posix() in named or parents & named or path.name in named, f"{page[:30]!r} lacks {inner}"


def test_files_of_tests_then_no_two_have_the_same_name():
    """One process that collects both would find only the first: folders of tests are no packages."""
    paths = sorted(Path(__file__).parents[1].rglob("test_*.py"))
    names = [path.name for path in paths]
    assert not [path for path in paths if names.count(path.name) > 1]


def test_every_room_then_it_has_a_readme():
    rooms = {path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {room.name for room in rooms if not (room / "README.md").exists()} == set()


def expanded(name: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    found = re.fullmatch(r"(.*)\{([^}]*)\}(.*)", name)
    return [name] if found is None else [f"{found[1]}{part.strip()}{found[3]}" for part in found[2].split(",")]


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
    assert bool(wrong_imports(path, tmp_path)) == wrong


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
