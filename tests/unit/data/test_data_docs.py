"""What the documentation of data promises is what the code has."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from lightning_recsys.data import Schema, SyntheticDataModule, TabularDataModule
from lightning_recsys.data.tables.schema import FEATURES, KEYS
from lightning_recsys.data.tables.schema_parts import Label

ROOT = Path(__file__).parents[3]
DATA, SCHEMA, FILES = (
    (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("data", "schema", "data_files")
)


def table_after(heading: str, *, page: str, number: int = 0) -> list[list[str]]:
    """Cells of a table below a heading."""
    section = re.split(r"^## ", page.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in tables[number].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_docs_when_they_list_the_keys_of_a_schema_then_list_them_all():
    assert [names(row[0])[0] for row in table_after("The schema, key by key", page=SCHEMA)] == KEYS


def test_docs_when_they_list_the_options_of_a_column_then_list_them_all_with_their_defaults():
    listed = {
        (kind, names(option)[0]): default
        for kinds, option, default, _ in table_after("The schema, key by key", page=SCHEMA, number=1)
        for kind in names(kinds)
    }
    expected = {}
    for kind, options in {**FEATURES, "label": Label}.items():
        for option in fields(options):
            if option.default is not MISSING:
                expected[kind, option.name] = option.default
    assert listed.keys() == expected.keys()
    for key, default in listed.items():
        shown = "" if default == "none" else yaml.safe_load(names(default)[0].replace("\\|", "'|'"))
        assert (shown or None) == (expected[key] or None)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", DATA + SCHEMA + FILES, flags=re.DOTALL))
def test_docs_when_they_show_a_schema_then_it_can_be_read(block):
    if block.startswith(("split:", "joins:")):  # parts of one
        for part in re.findall(r"^split:.*$", block, flags=re.MULTILINE) or [block]:
            whole = {
                "files": "a.csv",
                "label": "click",
                "categorical": ["user"],
                "time": "when",
                **yaml.safe_load(part),
            }
            assert Schema.from_dict(whole).files
    else:
        assert Schema.from_dict(yaml.safe_load(block)).files


def test_docs_when_they_describe_synthetic_data_then_describe_every_argument():
    listed = [name for row in table_after("Synthetic clicks", page=DATA) for name in names(row[0])]
    arguments = set(inspect.signature(SyntheticDataModule.__init__).parameters) - {"self"}
    assert set(listed) == arguments - {"batch_size", "seed", "drop_last"}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("synthetic", SyntheticDataModule),
        ("tabular", TabularDataModule),
        ("movielens", TabularDataModule),
        ("movielens_official", TabularDataModule),
        ("adult", TabularDataModule),
    ],
)
def test_config_when_compared_with_its_class_then_has_every_argument(name, module):
    config = yaml.safe_load((ROOT / "conf" / "data" / f"{name}.yaml").read_text())
    parameters = inspect.signature(module.__init__).parameters
    assert set(config) - {"_target_", "_convert_"} == set(parameters) - {"self"}
    if module is TabularDataModule and name != "tabular":
        Schema.from_dict(config["schema"])
    if name == "synthetic":
        for key in set(config) - {"_target_", "_convert_", "seed"}:
            default = parameters[key].default
            assert config[key] == (list(default) if isinstance(default, tuple) else default or config[key])
