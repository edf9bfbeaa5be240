"""The ids of a batch that fall into given ranges of rows, as a compiled loop.

In torch this takes a dozen small operations for each feature: 5 ms where this takes 0.1 ms (26 features, 512 examples,
two servers).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from lightning_recsys.optim.compiled import compile_loop


@compile_loop
def keep_rows(ids, offsets, weights, ranges, batch_size, kept_ids, kept_offsets, kept_weights):  # noqa: ANN001, ANN201
    """Keep the ids in each range, counted from its first row; returns how many there are.

    Args:
        ids: Of the whole batch, feature-major.
        offsets: Of its bags; empty where each holds one id.
        weights: Of the ids; empty where all are 1.
        ranges: Feature, first row and number of rows, ``[R, 3]``; the ranges of one feature do not overlap.
        batch_size: Examples.
        kept_ids: Result, ranges behind each other; room for as many as ``ids``.
        kept_offsets: Result, ``[R * B + 1]``, with a 0 in the first place.
        kept_weights: Result; empty where ``weights`` is.
    """
    count = 0
    for i in range(ranges.shape[0]):
        feature, first_row, num_rows = ranges[i, 0], ranges[i, 1], ranges[i, 2]
        for b in range(batch_size):
            bag = feature * batch_size + b
            start, stop = bag, bag + 1
            if offsets.shape[0]:
                start, stop = offsets[bag], offsets[bag + 1]
            for position in range(start, stop):
                row = ids[position] - first_row
                if np.uint64(row) < np.uint64(num_rows):  # a row before the first is a large number so
                    kept_ids[count] = row
                    if weights.shape[0]:
                        kept_weights[count] = weights[position]
                    count += 1
            kept_offsets[i * batch_size + b + 1] = count
    return count
