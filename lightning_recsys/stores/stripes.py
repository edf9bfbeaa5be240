"""Tables that are cut into stripes: row ``r`` of ``n`` stripes is row ``r div n`` of stripe ``r mod n``.

Compiled loops: in torch the split of a batch takes a dozen small operations for each feature, 5 ms where this takes
0.2 ms (26 features, 512 examples, two to four servers). Ids are divided once for all servers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from lightning_recsys.compiled.loops import compile_loop


@compile_loop
def stripe_rows(ids, bounds, num_stripes, stripes, rows):  # noqa: ANN001, ANN201
    """Find the stripe of each id, and its row there.

    Args:
        ids: Ids of the whole batch, feature-major, int64 ``[N]``.
        bounds: Where each feature's ids begin and end, int64 ``[F + 1]``.
        num_stripes: Number of stripes of each feature's table, int64 ``[F]``.
        stripes: Result, int32 ``[N]``: the stripe of each id.
        rows: Result, int64 ``[N]``: the row of each id within its stripe.
    """
    for f in range(num_stripes.shape[0]):
        n = np.uint64(num_stripes[f])
        if n == 1:
            for i in range(bounds[f], bounds[f + 1]):
                stripes[i], rows[i] = 0, ids[i]
        elif n & (n - np.uint64(1)) == 0:  # a shift takes a tenth of a division
            shift = np.uint64(0)
            while (n >> shift) > 1:
                shift += np.uint64(1)
            for i in range(bounds[f], bounds[f + 1]):
                row = np.uint64(ids[i])
                stripes[i], rows[i] = np.int32(row & (n - np.uint64(1))), np.int64(row >> shift)
        else:
            for i in range(bounds[f], bounds[f + 1]):
                row = np.uint64(ids[i])
                above = row // n
                stripes[i], rows[i] = np.int32(row - above * n), np.int64(above)


@compile_loop
def keep_stripes(rows, stripes, offsets, weights, wanted, batch_size, kept, kept_offsets, kept_weights):  # noqa: ANN001, ANN201
    """Keep the rows of some stripes; returns how many there are.

    Args:
        rows: Rows of the whole batch within their stripes, feature-major.
        stripes: The stripe of each of these rows.
        offsets: Where each bag begins and the last one ends; empty where each bag holds one id.
        weights: Weight of each id; empty where all are 1.
        wanted: Feature and stripe, ``[W, 2]``, none twice.
        batch_size: Number of examples of the batch.
        kept: Result, one wanted stripe behind the other; room for as many as ``rows``.
        kept_offsets: Result, ``[W * B + 1]``, with a 0 in the first place.
        kept_weights: Result: the weights of the kept rows; empty where ``weights`` is.
    """
    count = 0
    for i in range(wanted.shape[0]):
        feature, stripe = wanted[i, 0], wanted[i, 1]
        for b in range(batch_size):
            bag = feature * batch_size + b
            start, stop = bag, bag + 1
            if offsets.shape[0]:
                start, stop = offsets[bag], offsets[bag + 1]
            for position in range(start, stop):
                if stripes[position] == stripe:
                    kept[count] = rows[position]
                    if weights.shape[0]:
                        kept_weights[count] = weights[position]
                    count += 1
            kept_offsets[i * batch_size + b + 1] = count
    return count


@compile_loop
def place_keys(keys, first_keys, num_stripes, first_parts, stores, starts, counts, positions, rows):  # noqa: ANN001, ANN201
    """Sort keys by the store that has their row.

    Args:
        keys: int64 ``[K]``: numbers of rows among those of all tables.
        first_keys: First key of each table, rising, int64 ``[T]``; unsigned, as all keys and rows here.
        num_stripes: Number of stripes of each table, int64 ``[T]``.
        first_parts: Where each table's stripes begin in what follows, int64 ``[T]``.
        stores: The store of each stripe, int64 ``[P]``.
        starts: The stripe's first row there, int64 ``[P]``.
        counts: Result: keys of each store, int64 ``[S]``, zero at first.
        positions: Result: the places of each store's keys among all, store by store, rising, int64 ``[K]``.
        rows: Result: their rows there, in the same order, int64 ``[K]``.
    """
    places, owners = np.empty(keys.shape[0], dtype=np.int64), np.empty(keys.shape[0], dtype=np.int32)
    for i in range(keys.shape[0]):
        low, high = 0, first_keys.shape[0]
        while high - low > 1:
            middle = (low + high) // 2
            if np.uint64(first_keys[middle]) <= np.uint64(keys[i]):
                low = middle
            else:
                high = middle
        n, row = np.uint64(num_stripes[low]), np.uint64(keys[i] - first_keys[low])
        above = row // n if n > 1 else row
        part = first_parts[low] + np.int64(row - above * n)
        owners[i], places[i] = stores[part], starts[part] + np.int64(above)
        counts[owners[i]] += 1
    ends = np.zeros(counts.shape[0], dtype=np.int64)
    for store in range(1, counts.shape[0]):
        ends[store] = ends[store - 1] + counts[store - 1]
    for i in range(keys.shape[0]):
        at = ends[owners[i]]
        positions[at], rows[at] = i, places[i]
        ends[owners[i]] = at + 1
