"""Tables in memory as a schema describes them, beside files with the same rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_recsys.data.raw import Position, TabularFormat

SCHEMA = {
    "files": {"train": "clicks.parquet"},
    "label": {"column": "clicked"},
    "dense": {"price": {}, "age": {}},
    "categorical": {"shop": {}, "city": {}},
    "multi_valued": {"tags": {}},
    "joins": [{"file": "users.csv", "column": "user", "key": "id"}],
}


@pytest.fixture
def table(tmp_path):
    (tmp_path / "users.csv").write_text("id,age,city\n1,30,Rome\n2,,Oslo\n")
    draw = np.random.default_rng(0)
    return pa.table(
        {
            "clicked": draw.integers(0, 2, 50),
            "price": pa.array(draw.normal(size=50), mask=draw.random(50) < 0.2),
            "shop": pa.array([f"shop {x}" for x in draw.integers(0, 5, 50)]).dictionary_encode(),
            "tags": [[f"tag {x}" for x in draw.integers(0, 3, n)] for n in draw.integers(0, 3, 50)],
            "user": draw.integers(1, 4, 50),
        }
    )


def in_chunks(table, sizes):
    """The same rows, some at a time: dictionaries of the chunks differ."""
    starts = np.cumsum([0, *sizes[:-1]])
    chunks = [table.slice(start, size) for start, size in zip(starts, sizes, strict=True)]
    plain = [chunk.set_column(2, "shop", chunk["shop"].cast(pa.string()).dictionary_encode()) for chunk in chunks]
    return pa.concat_tables(plain)


def plain(rows):
    """Everything of some rows, in lists."""
    words = {name: values.cast(pa.binary()).to_pylist() for name, values in rows.categories.items()}
    bags = {name: (bag.values.cast(pa.binary()).to_pylist(), list(bag.lengths_N)) for name, bag in rows.bags.items()}
    return [*rows.lines_N], [*rows.labels_N], np.nan_to_num(rows.dense_IN, nan=-1e9).tolist(), words, bags


@pytest.mark.parametrize("sizes", [(50,), (20, 30), (1, 0, 49)])
def test_table_when_in_memory_then_its_rows_are_those_of_a_file_side_tables_included(table, tmp_path, sizes):
    pq.write_table(table, tmp_path / "clicks.parquet")
    of_file = TabularFormat(schema=SCHEMA, root=tmp_path)
    (path,) = of_file.files("train")
    (block,) = of_file.blocks(path, block_bytes=1 << 20, position=Position())
    of_memory = TabularFormat(schema=SCHEMA, root=tmp_path)
    expected = plain(of_file.parse_block(path, block))
    assert plain(of_memory.parse_table(Path("train"), in_chunks(table, sizes))) == expected
    assert {b"Rome", b"Oslo", None} == set(expected[3]["city"])


def test_table_when_it_has_no_rows_then_none_come(table, tmp_path):
    rows = TabularFormat(schema=SCHEMA, root=tmp_path).parse_table(Path("train"), table.slice(0, 0))
    assert len(rows.lines_N) == len(rows.bags["tags"].lengths_N) == 0


def test_table_when_it_has_other_columns_than_the_one_of_that_name_before_then_they_count(table, tmp_path):
    raw_format = TabularFormat(schema=SCHEMA, root=tmp_path)
    raw_format.parse_table(Path("train"), table)
    with pytest.raises(
        ValueError, match=r"column 'shop', which is not in train or .*users\.csv\..* has clicked, .*user\.$"
    ):
        raw_format.parse_table(Path("train"), table.drop_columns(["shop"]))
    with pytest.raises(ValueError, match="train: it has column 'price' more than once"):
        raw_format.parse_table(Path("train"), table.append_column("price", table["price"]))


def test_table_when_a_column_has_more_than_arrow_keeps_in_one_piece_then_refused_and_not_cut(table, tmp_path):
    class Large:
        schema = table.schema

        def __len__(self):
            return 100

        def combine_chunks(self):  # as of a column of more than 2 GiB
            return pa.Table.from_batches([*table.to_batches(), *table.to_batches()])

    with pytest.raises(ValueError, match="train: a column of 100 rows has more than 2 GiB"):
        TabularFormat(schema=SCHEMA, root=tmp_path).parse_table(Path("train"), Large())
