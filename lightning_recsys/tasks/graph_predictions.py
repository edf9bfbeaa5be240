"""Predictions of trained graph tasks as tables: classes of all nodes, and the best items of all users."""

# Shape suffixes: N nodes, K classes, H width of vectors, B batch, U users, I items.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.graph import GraphBatch, InteractionDataModule, NodeDataModule
from lightning_recsys.tasks.graph import GraphTask, LinkPredictionTask, NodeClassificationTask

SearchMethod = Literal["exact", "faiss"]

_BATCH = 1024
_NEIGHBORS = 32  # of each item in the graph that FAISS searches
_BREADTH = 128  # candidates that its search keeps, at least

_Known = Sequence[NDArray[np.int64]]
_Search = Callable[[Tensor, _Known], tuple[Tensor, Tensor]]
"""Scores and items for some users ``[B, H]``, best first, item -1 where there are no more.

Known items may be among them.
"""


def predict_nodes(
    task: NodeClassificationTask, data: NodeDataModule, *, embeddings: bool = False, batch_size: int = _BATCH
) -> Iterator[pa.Table]:
    """The class of each node of a graph, those without a label among them, some nodes at a time.

    Args:
        task: A trained task, on the device where it is to predict.
        data: The nodes that it was trained on, set up. A node's neighbours are drawn as in evaluation.
        embeddings: Whether each node's vector before the last layer comes with it.
        batch_size: Nodes at a time.

    Yields:
        Tables with a row for each node, in the order of the nodes: ``id`` as its table has it (else its number), the
        ``prediction`` as that table calls the class (else its number), the probability of each class as ``p_<class>``,
        and ``embedding``, a list of numbers, if it is asked for.
    """
    nodes = data.nodes
    names = np.array(range(data.num_classes) if nodes.classes is None else nodes.classes)
    for numbers, batch in _batches(task, data, np.arange(nodes.graph.num_nodes), batch_size):
        with torch.inference_mode():
            hidden, scores = task.vectors_and_scores(batch)
        p_BK = scores.softmax(1).cpu().numpy()
        columns: dict[str, Any] = {
            "id": pa.array(numbers) if nodes.ids is None else nodes.ids.take(pa.array(numbers)),
            "prediction": pa.array(names[p_BK.argmax(1)]),
            **{f"p_{name}": pa.array(np.ascontiguousarray(p_BK[:, k])) for k, name in enumerate(names)},
        }
        if embeddings:
            columns["embedding"] = _lists(hidden)
        yield pa.table(columns)


def embed_users_and_items(
    task: LinkPredictionTask, data: InteractionDataModule, *, batch_size: int = _BATCH
) -> tuple[Tensor, Tensor]:
    """The vectors of all users ``[U, H]`` and of all items ``[I, H]``, whose dot products are the scores of pairs.

    Args:
        task: A trained task, on the device where it is to predict.
        data: The users and items that it was trained on, set up.
        batch_size: Nodes at a time.
    """
    num_nodes = data.nodes.graph.num_nodes
    with torch.inference_mode():
        parts = [task.vectors(batch) for _, batch in _batches(task, data, np.arange(num_nodes), batch_size)]
        vectors = torch.cat(parts)
    num_users = data.interactions.num_users
    return vectors[:num_users], vectors[num_users:]


def recommend(
    task: LinkPredictionTask,
    data: InteractionDataModule,
    *,
    top_k: int = 10,
    taken: bool = False,
    search: SearchMethod = "exact",
    batch_size: int = _BATCH,
) -> Iterator[pa.Table]:
    """The items with the highest scores for each user, some users at a time.

    Args:
        task: A trained task, on the device where it is to predict.
        data: The users and items that it was trained on, set up.
        top_k: Items for each user; fewer where there are no more.
        taken: Whether items that the user took, in whichever split, may be among them.
        search: ``exact`` scores every user with every item; ``faiss`` searches a graph of the items (HNSW), which is
            faster where there are many, and misses some of the best.
        batch_size: Nodes, and users, at a time.

    Yields:
        Tables ``user``, ``item``, ``rank`` from 1 and ``score``, by user and rank; users and items as their tables have
        them.

    Raises:
        ValueError: ``top_k`` is not positive, or the search is unknown.
        ImportError: FAISS is not installed.

    Reference: Malkov, Yashunin 2018, Efficient and Robust Approximate Nearest Neighbor Search Using Hierarchical
    Navigable Small World Graphs.
    """
    if top_k < 1 or search not in get_args(SearchMethod):
        raise ValueError(f"top_k must be at least 1 and search exact or faiss, got {top_k} and {search!r}.")
    every = data.interactions
    users_UH, items_IH = embed_users_and_items(task, data, batch_size=batch_size)
    find = (_exact if search == "exact" else _faiss)(items_IH, min(top_k, every.num_items))
    order = np.argsort(every.users, kind="stable")
    items = every.items[order]
    starts = np.concatenate([[0], np.bincount(every.users, minlength=every.num_users).cumsum()])
    user_ids, item_ids = (
        pa.array(np.arange(count)) if ids is None else ids
        for ids, count in ((every.user_ids, every.num_users), (every.item_ids, every.num_items))
    )
    for first in range(0, every.num_users, batch_size):
        users = np.arange(first, min(first + batch_size, every.num_users))
        known = [items[:0] if taken else items[starts[user] : starts[user + 1]] for user in users]
        scores, found = (x.cpu().numpy() for x in find(users_UH[first : first + len(users)], known))
        yield _ranked(users, found, scores, known, top_k, (user_ids, item_ids))


def _batches(task: GraphTask, data: Any, nodes: NDArray[np.int64], size: int) -> Iterator[tuple[Any, GraphBatch]]:
    """Some nodes at a time, as seeds on the task's device."""
    rows, device = data.around(nodes), next(task.parameters()).device
    task.eval()
    for first in range(0, len(nodes), size):
        chosen = torch.arange(first, min(first + size, len(nodes)))
        yield nodes[chosen.numpy()], rows.take(chosen).to(device)


def _exact(items_IH: Tensor, top_k: int) -> _Search:
    def find(users_BH: Tensor, known: _Known) -> tuple[Tensor, Tensor]:
        scores_BI = users_BH @ items_IH.T
        rows = np.repeat(np.arange(len(known)), list(map(len, known)))
        scores_BI[torch.from_numpy(rows), torch.from_numpy(np.concatenate(known))] = -torch.inf
        found = scores_BI.topk(top_k, dim=1)
        return found.values, found.indices.masked_fill(found.values == -torch.inf, -1)

    return find


def _faiss(items_IH: Tensor, top_k: int) -> _Search:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("search=faiss needs FAISS: pip install 'lightning-recsys[search]'.") from error
    index = faiss.IndexHNSWFlat(items_IH.shape[1], _NEIGHBORS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BREADTH
    index.add(items_IH.cpu().numpy())

    def find(users_BH: Tensor, known: _Known) -> tuple[Tensor, Tensor]:
        count = min(len(items_IH), top_k + max(map(len, known)))
        index.hnsw.efSearch = max(_BREADTH, 2 * count)
        scores, found = index.search(users_BH.cpu().numpy(), count)
        return torch.from_numpy(scores), torch.from_numpy(found)

    return find


def _ranked(
    users: NDArray[np.int64],
    found: NDArray[np.int64],
    scores: NDArray[np.float32],
    known: _Known,
    top_k: int,
    ids: tuple[pa.Array, pa.Array],
) -> pa.Table:
    """The best of what was found for each user, without what is known."""
    allowed = found >= 0
    for row, taken in enumerate(known):
        if len(taken):
            allowed[row] &= ~np.isin(found[row], taken)
    allowed &= np.cumsum(allowed, 1) <= top_k
    rows, places = np.nonzero(allowed)
    return pa.table(
        {
            "user": ids[0].take(pa.array(users[rows])),
            "item": ids[1].take(pa.array(found[rows, places])),
            "rank": pa.array(np.cumsum(allowed, 1)[rows, places]),
            "score": pa.array(scores[rows, places]),
        }
    )


def _lists(vectors_BH: Tensor) -> pa.Array:
    flat = vectors_BH.float().cpu().numpy()
    offsets = np.arange(0, flat.size + 1, flat.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(flat).ravel()))
