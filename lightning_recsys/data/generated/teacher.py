"""Where synthetic clicks come from: hashed features, and a teacher that knows each row's click probability."""

# Shape suffixes: B batch, K batches, F single-hot features, N ids of one feature's bags, D dense features, C channels
# (see below).

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.generated.zipf import ZipfSampler
from lightning_recsys.data.hashing import key64, mix64, uniform
from lightning_recsys.embeddings import SparseFeatures

Hashes = NDArray[np.uint64]
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_CHANNELS = 4  # 16-bit numbers in one hash: a main effect and three factors of the pairwise interactions
# A feature's effects shrink with its number of ids, so that most of the signal is in ids that are seen often enough to
# be learned from a million rows. Interactions shrink faster: a pair of features has as many of them as pairs of ids.
_DECAY = np.array([-0.25, -0.75, -0.75, -0.75])
_DENSE_IDS = 4  # the dense features together weigh as much as a feature of that many ids
_DENSE_STD = 2.0**16 / np.sqrt(3)  # of the sum of four 16-bit numbers
_CALIBRATION_ROWS = 32_768


class SyntheticClicks:
    r"""A seeded world of clicks, of which any row can be generated alone.

    Every number is a hash of its coordinates (seed, split, row, feature), so rows cost no memory and come out the same
    in any order and on any rank. The teacher is a factorization machine whose effect ``w`` and factors ``v`` of each id
    are hashes too, so that a feature may have ``1e9`` ids:

    .. math:: \operatorname{logit} p = b + \sigma\sqrt{1-s}\;\frac{\sum_f w_f}{\operatorname{std}}
        + \sigma\sqrt{s}\;\frac{\sum_{f<g} \langle v_f, v_g\rangle}{\operatorname{std}}

    with both sums centred. ``f`` runs over the categorical features (a bag adds up its ids' effects) and one linear map
    of the dense features; features of few ids have the larger effects. A logistic regression can learn the first sum;
    the second takes a model with interactions.

    Args:
        cardinalities: Number of ids of each categorical feature; the features are named ``c0``, ``c1``, ...
        multi_hot: Largest bag of each multi-hot feature; each length from 0 to that is equally likely.
        num_dense: Number of dense features: near normal, variance 1, within 3.5.
        zipf_exponent: Skew of the ids; see :class:`~lightning_recsys.data.generated.zipf.ZipfSampler`.
        base_rate: Mean click probability, between 0 and 1.
        signal: Standard deviation ``sigma`` of the logit.
        interaction_share: Share ``s`` of the logit's variance that comes from interactions.
        seed: Seed of all features, effects and labels: another one makes another world.
    """

    def __init__(
        self,
        *,
        cardinalities: Sequence[int],
        multi_hot: Mapping[str, int],
        num_dense: int,
        zipf_exponent: float,
        base_rate: float,
        signal: float,
        interaction_share: float,
        seed: int,
    ) -> None:
        # Nothing here changes after construction. The features, in the order of a batch, with their numbers of ids; of
        # those in `_multi_hot` the largest bag, the others are in `_single_hot`; how the ids of both are drawn.
        self._seed = seed
        self._fields = {f"c{i}": n for i, n in enumerate(cardinalities)}
        self._multi_hot = dict(multi_hot)
        self._single_hot = [name for name in self._fields if name not in multi_hot]
        self._samplers = {name: ZipfSampler([self._fields[name]], exponent=zipf_exponent) for name in multi_hot}
        self._single_sampler = ZipfSampler([self._fields[name] for name in self._single_hot], exponent=zipf_exponent)
        # What a row's hash is combined with for a feature's id and for its dense values, and an id for its effects.
        self._draw_keys = self._keys("draw", self._single_hot)
        self._effect_keys = self._keys("effect", self._single_hot)
        self._dense_keys = self._keys("dense", range(num_dense))
        # The effects of the dense features, and how large those of ids may be.
        dense_size = _size([_DENSE_IDS]) / np.sqrt(max(num_dense, 1))
        self._dense_effects_DC = _effects(self._keys("dense effect", range(num_dense)), dense_size[0])
        self._effect_size = _size([self._fields[name] for name in self._single_hot])
        # Last, as it draws rows: the two parts' means, what they are scaled with, and the logit's bias.
        self._calibrate(base_rate, signal, interaction_share)

    def take(self, split: str, rows_B: Ids) -> Batch:
        """The rows of a split with these numbers."""
        hashes_B = self._row_hashes(split, rows_B)
        dense_DB, ids, lengths, effects = self._features(hashes_B)
        clicked = uniform(mix64(hashes_B ^ key64(self._seed, "click"))) < self._teach(effects)
        return Batch(
            dense=torch.from_numpy(np.ascontiguousarray(dense_DB.T)),
            sparse=SparseFeatures(
                tuple(self._fields),
                torch.from_numpy(ids),
                lengths=None if lengths is None else torch.from_numpy(lengths),
            ),
            labels=torch.from_numpy(clicked.astype(np.float32)),
        )

    def take_many(self, split: str, rows_KB: Ids) -> list[Batch]:
        """The rows of a split as ``K`` batches, for little more than one of them costs; each as :meth:`take` has it."""
        if self._multi_hot:
            return [self.take(split, rows_B) for rows_B in rows_KB]
        whole, (num_batches, size) = self.take(split, rows_KB.ravel()), rows_KB.shape
        ids_KN = whole.sparse.values.view(-1, num_batches, size).transpose(0, 1).reshape(num_batches, -1)
        return [
            Batch(dense_BD.clone(), SparseFeatures(whole.sparse.keys, ids_N), labels_B)  # dense starts at a cache line
            for dense_BD, ids_N, labels_B in zip(
                torch.split(whole.dense, size), ids_KN.unbind(), torch.split(whole.labels, size), strict=True
            )
        ]

    def probabilities(self, split: str, rows_B: Ids) -> NDArray[np.float64]:
        """The teacher's click probability of each row. No model predicts the labels better."""
        *_, effects = self._features(self._row_hashes(split, rows_B))
        return self._teach(effects)

    def _keys(self, purpose: str, names: Iterable[int | str]) -> Hashes:
        return np.array([key64(self._seed, purpose, name) for name in names], dtype=np.uint64)

    def _row_hashes(self, split: str, rows_B: Ids) -> Hashes:
        return mix64(rows_B.astype(np.uint64) + key64(self._seed, split))

    def _features(self, hashes_B: Hashes) -> tuple[Floats, Ids, Ids | None, _Effects]:
        """Dense values ``[D, B]``, ids feature by feature, bag lengths ``[features * B]`` or ``None``, and effects."""
        dense_DB = _halves(mix64(hashes_B ^ self._dense_keys[:, None])).sum(-1) / np.float32(_DENSE_STD)
        effects = _Effects(len(hashes_B))
        effects.add((dense_DB[:, :, None] * self._dense_effects_DC[:, None]).sum(0))
        ids_FB = _draw(self._single_sampler, mix64(hashes_B ^ self._draw_keys[:, None]))
        effects.add_each(_effects(ids_FB.view(np.uint64) + self._effect_keys[:, None], self._effect_size))
        if not self._multi_hot:
            return dense_DB, ids_FB.reshape(-1), None, effects
        ids = dict(zip(self._single_hot, ids_FB, strict=True))
        lengths = dict.fromkeys(self._single_hot, np.ones(len(hashes_B), dtype=np.int64))
        for name in self._multi_hot:
            ids[name], lengths[name] = self._bags(name, hashes_B, effects)
        order = list(self._fields)
        return dense_DB, np.concatenate([ids[f] for f in order]), np.concatenate([lengths[f] for f in order]), effects

    def _bags(self, name: str, hashes_B: Hashes, effects: _Effects) -> tuple[Ids, Ids]:
        """Ids ``[N]`` and lengths ``[B]`` of a multi-hot feature, whose effects are added to the others."""
        size = self._multi_hot[name]
        length_key, draw_key, effect_key = (key64(self._seed, use, name) for use in ("length", "draw", "effect"))
        lengths_B = (uniform(mix64(hashes_B ^ length_key)) * (size + 1)).astype(np.int64)
        row_N = np.repeat(np.arange(len(hashes_B)), lengths_B)
        place_N = np.arange(len(row_N)) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        hashes_N = mix64(mix64(hashes_B ^ draw_key)[row_N] + place_N.astype(np.uint64))
        (ids_N,) = _draw(self._samplers[name], hashes_N[None])
        effects_NC = _effects(ids_N.view(np.uint64) + effect_key, _size([self._fields[name]])[0] / np.sqrt(size))
        sums = [np.bincount(row_N, weights=channel, minlength=len(hashes_B)) for channel in effects_NC.T]
        effects.add(np.stack(sums, axis=1).astype(np.float32))
        return ids_N, lengths_B

    def _calibrate(self, base_rate: float, signal: float, interaction_share: float) -> None:
        """Scale the teacher's two parts, and shift it, so that clicks have the wanted signal and base rate."""
        rows = np.arange(_CALIBRATION_ROWS)
        *_, effects = self._features(self._row_hashes("calibration", rows))
        parts = np.stack([effects.main(), effects.interaction()])
        shares = np.array([1 - interaction_share, interaction_share])
        self._mean, std = parts.mean(1, keepdims=True), parts.std(1, keepdims=True)
        self._scale = np.divide(signal * np.sqrt(shares)[:, None], std, out=np.zeros_like(std), where=std > 0)
        low, high = -50.0, 50.0
        for _ in range(60):  # bisection: the mean probability rises with the bias
            self._bias = (low + high) / 2
            too_low = self._teach(effects).mean() < base_rate
            low, high = (self._bias, high) if too_low else (low, self._bias)

    def _teach(self, effects: _Effects) -> NDArray[np.float64]:
        parts = np.stack([effects.main(), effects.interaction()])
        logits = self._bias + ((parts - self._mean) * self._scale).sum(0)
        probabilities: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
        return probabilities


class _Effects:
    """Running sums over the features, from which the teacher's logit follows (the factorization machine's trick)."""

    def __init__(self, batch_size: int) -> None:
        self._sum_BC = np.zeros((batch_size, _CHANNELS), dtype=np.float32)
        self._square_sum_BC = np.zeros((batch_size, _CHANNELS), dtype=np.float32)

    def add(self, effect_BC: Floats) -> None:
        self._sum_BC += effect_BC
        self._square_sum_BC += effect_BC * effect_BC

    def add_each(self, effects_FBC: Floats) -> None:
        self._sum_BC += effects_FBC.sum(0)
        self._square_sum_BC += np.multiply(effects_FBC, effects_FBC, out=effects_FBC).sum(0)

    def main(self) -> NDArray[np.float64]:
        return self._sum_BC[:, 0].astype(np.float64)

    def interaction(self) -> NDArray[np.float64]:
        pairs = self._sum_BC[:, 1:].astype(np.float64) ** 2 - self._square_sum_BC[:, 1:]
        total: NDArray[np.float64] = pairs.sum(1) / 2
        return total


def _draw(sampler: ZipfSampler, hashes_FN: Hashes) -> Ids:
    return sampler(uniform(hashes_FN), uniform(mix64(hashes_FN[sampler.tailed])))


def _halves(hashes: Hashes) -> Floats:
    """Four numbers in ``[-2**15, 2**15)`` from each hash, in a new last dimension."""
    return hashes.view(np.int16).reshape(*hashes.shape, _CHANNELS).astype(np.float32)


def _effects(keys: Hashes, size_C: NDArray[np.float64]) -> Floats:
    """Four effects for each key, in a new last dimension, within ``size_C`` of 0."""
    return _halves(mix64(keys)) * (size_C * 2.0**-15).astype(np.float32)


def _size(num_ids: Sequence[int]) -> NDArray[np.float64]:
    """How large the effects of features with that many ids may be; shape ``[F, 1, C]``."""
    sizes: NDArray[np.float64] = np.asarray(num_ids, dtype=np.float64)[:, None, None] ** _DECAY
    return sizes
