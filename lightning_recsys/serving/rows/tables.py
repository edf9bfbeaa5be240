"""The rows of one version of a model, for lookups: files that stay where they are, and an index of what changed."""

# Shape suffixes: N ids, B batch, F features, D embedding dim, M missing rows.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.hash_table import copy_into, make_table
from lightning_recsys.embeddings import Backend, SparseFeatures, Ticket
from lightning_recsys.embeddings.int64_ids import as_int64s
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.serving.manifest import Collection
from lightning_recsys.serving.rows.files import Floats, Integers, RowFile, block_rows
from lightning_recsys.serving.rows.lookups import GONE, MISSING, find_places, index_rows, sum_bags_for
from lightning_recsys.serving.rows.packing import RowFormat, num_words, pack_rows, sum_packed_for
from lightning_recsys.stores.checks import check_rows
from lightning_recsys.stores.dynamic.drawing import RowDrawing

_NO_OFFSETS = np.empty(0, dtype=np.int64)
_NO_WEIGHTS = np.empty(0, dtype=np.float32)


class PublishedRows(Backend):
    """The rows of a collection as one version has them; nothing of it ever changes.

    Rows stay in the files' pages, which the system shares between processes. A process has of its own an index of the
    rows that changed since the base and, where rows come and go, of all that exist: 32 to 64 bytes for each.

    Args:
        collection: The tables of the collection.
        files: The rows of each table in the base; ``None`` for a table without any.
        row_format: Format in which rows are stored.
    """

    def __init__(
        self, collection: Collection, files: Sequence[RowFile | None], row_format: RowFormat = "float32"
    ) -> None:
        super().__init__()
        self.tables = tuple(table.config for table in collection.tables)
        self.layout = layout = TableLayout(self.tables)
        self._dim, self._format = layout.embedding_dim, row_format
        self._width = num_words(self._dim, row_format)  # elements of a stored row: floats, or words of a packed one
        rules = [table.drawing for table in collection.tables]
        self._drawing = RowDrawing(  # the values of rows that do not exist
            layout,
            first_keys=(0 if rule is None else rule.first_key for rule in rules),
            key_steps=(1 if rule is None else rule.key_step for rule in rules),
            seed=next((rule.seed for rule in rules if rule is not None), 0),
        )
        self._starts = as_int64s(layout.table_starts.values())  # number in the collection of each table's id 0
        self._shift = block_rows(self._width).bit_length() - 1  # the base's blocks have 2 ** shift rows
        self._files: tuple[RowFile, ...] = ()  # what the places point into
        first: dict[str, int] = {}
        self._anchor: Floats = np.zeros(1, dtype=np.float32)  # places are distances from it, in elements
        # The places of rows that are not in the base as they are now, by their number; how many rows it has noted.
        self._index, self._num_indexed = make_table(0), 0
        blocks: list[int] = []
        for table, file in zip(collection.tables, files, strict=True):
            first[table.config.name] = -1 if table.drawing is not None else len(blocks)
            if file is not None and table.drawing is None:
                self._files += (file,)
                blocks += [self._place(block) for block in file.blocks]
        self._blocks = np.array(blocks, dtype=np.int64)  # the place of each block of the base, table by table
        # For each feature's table the number of id 0, and the first block; -1 where only rows of the index exist.
        self._first_rows = as_int64s(layout.feature_starts)
        self._first_blocks = np.array([first[table.name] for table in layout.feature_tables], dtype=np.int64)
        for number, (table, file) in enumerate(zip(collection.tables, files, strict=True)):
            if table.drawing is not None and file is not None:
                self._note(number, file, _NO_OFFSETS)

    def changed(self, files: Sequence[RowFile | None], gone: Sequence[Integers]) -> PublishedRows:
        """The rows of the next version; these stay as they are.

        Args:
            files: The rows of each table that have changed.
            gone: The ids of each table whose rows were forgotten.
        """
        # Everything is the same object but what `_note` changes, of which the other one gets its own.
        other = PublishedRows.__new__(PublishedRows)
        other.__dict__.update(self.__dict__)
        for number, (file, ids) in enumerate(zip(files, gone, strict=True)):
            other._note(number, file, ids)
        return other

    def _note(self, number: int, file: RowFile | None, gone: Integers) -> None:
        """Let the index say where the rows of a file are, and which are no more."""
        count = (0 if file is None else file.num_rows) + len(gone)
        if not count:
            return
        index = make_table(self._num_indexed + count)
        copy_into(self._index, index)
        new = index_rows(index, gone, self._starts[number], GONE, 0) if len(gone) else 0
        if file is not None:
            self._files += (file,)
            for ids, block in zip(file.ids, file.blocks, strict=True):
                new += index_rows(index, ids, self._starts[number], self._place(block), self._width)
        self._index, self._num_indexed = index, self._num_indexed + new

    def _place(self, block: NDArray[Any]) -> int:
        distance = block.__array_interface__["data"][0] - self._anchor.__array_interface__["data"][0]
        place, rest = divmod(distance, 4)
        if rest:
            raise ValueError("the rows of a file do not begin at a whole number")
        return int(place)

    def lookup_frozen(self, sparse: SparseFeatures) -> Tensor:
        """Sum each bag's rows: float32 ``[B, F, D]``."""
        ids: NDArray[np.int64] = sparse.values.contiguous().numpy()
        bounds = np.array(sparse.feature_bounds(), dtype=np.int64)
        places, drawn = self._places(ids, bounds)
        offsets = _NO_OFFSETS if sparse.is_single_hot else sparse.bag_offsets().numpy()
        weights = _NO_WEIGHTS if sparse.weights is None else sparse.weights.numpy()
        if len(weights) and not len(offsets):
            offsets = np.arange(len(ids) + 1)
        out = np.zeros((sparse.batch_size, len(sparse.keys), self._dim), dtype=np.float32)
        sum_bags = sum_bags_for(self._dim) if self._format == "float32" else sum_packed_for(self._format)
        if len(ids):
            sum_bags(places, offsets, weights, self._anchor, out)
        del drawn  # only now: the places of missing rows point into it
        return torch.from_numpy(out)

    def _places(self, ids: Integers, bounds: Integers) -> tuple[Integers, NDArray[Any] | None]:
        """The place of each id's row; and the rows that were drawn, which must live as long as the places are used."""
        places, drawn = np.empty(len(ids), dtype=np.int64), None
        of_base = (self._index, self._first_blocks, self._blocks, self._shift, self._width)
        if find_places(ids, bounds, self._first_rows, *of_base, places):
            missing = np.flatnonzero(places == MISSING)
            features = np.searchsorted(bounds, missing, side="right") - 1
            drawn_MD = self._drawing.draw(self._first_rows[features] + ids[missing])
            drawn = pack_rows(torch.from_numpy(drawn_MD), self._format).numpy()
            places[missing] = self._place(drawn) + np.arange(len(missing)) * self._width
        return places, drawn

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:  # noqa: D102 - inherited
        return self.lookup_frozen(sparse), Ticket(sparse)

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        """Published rows are not trained.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the rows of a published version cannot be trained.")

    def rows_of(self, table: str, ids_N: Tensor) -> Tensor:
        """The rows of some ids of a table, float32 ``[N, D]``.

        Raises:
            KeyError: there is no such table.
            IndexError: an id is not in the table.
        """
        sizes = {config.name: config.num_embeddings for config in self.tables}
        if table not in sizes:
            raise KeyError(f"there is no table {table!r}; there are {list(sizes)}.")
        check_rows(ids_N, sizes[table])
        feature, width = self._feature_of(table), len(self.layout.feature_tables)
        empty = torch.zeros(width * len(ids_N), dtype=torch.int64)
        empty[feature * len(ids_N) : (feature + 1) * len(ids_N)] = 1
        names = tuple(name for x in self.tables for name in x.feature_names)
        return self.lookup_frozen(SparseFeatures(names, ids_N, lengths=empty))[:, feature]

    def stored_rows(self, table: str, ids_N: Tensor) -> Tensor:
        """The same as they are stored, bit by bit: float32 ``[N, D]``, or words, int32 ``[N, W]``."""
        feature, width = self._feature_of(table), len(self.layout.feature_tables)
        bounds = np.zeros(width + 1, dtype=np.int64)
        bounds[feature + 1 :] = len(ids_N)
        places, drawn = self._places(ids_N.contiguous().numpy(), bounds)
        out = np.zeros((len(ids_N), 1, self._width), dtype=np.float32)
        if len(ids_N):
            sum_bags_for(self._width)(places, _NO_OFFSETS, _NO_WEIGHTS, self._anchor, out)  # one each: copies
        del drawn
        words = torch.from_numpy(out[:, 0])
        return words if self._format == "float32" else words.view(torch.int32)

    def _feature_of(self, table: str) -> int:
        """The first feature of a table."""
        return [config.name for config in self.layout.feature_tables].index(table)

    def __getstate__(self) -> Mapping[str, Any]:
        raise TypeError("the rows of a published version are mapped: open them in the other process instead.")
