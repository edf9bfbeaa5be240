"""The factor of stale gradients against the closed forms of the paper's equations 3 to 8."""

import math
import pickle

import pytest
import torch

from lightning_recsys.sync import STALENESS_RULES, StalenessNormalization


@pytest.mark.parametrize(
    ("rule", "options", "staleness", "expected"),
    [
        ("identity", {}, 3000, 1.0),
        ("linear", {}, 1, 1.0),
        ("linear", {}, 875, 1 / 875),  # the paper's mean at 1 000 workers
        ("power", {}, 2090, 1 / 2090**2),  # eq. 4 with k = 2 at the mean of 3 000 workers
        ("power", {"power": 1}, 2090, 1 / 2090),
        ("power", {"power": 0.5}, 16, 0.25),
        ("literal", {}, 1000, 1.0),  # eq. 7 has its 1 at mu' itself
        ("literal", {}, 1001, 1 / 1001**2),
        ("literal", {}, 2090, 1 / 2090**2),
        ("literal", {"target": 10, "power": 3}, 20, 1 / 8000),
        ("relative", {}, 875, 1.0),
        ("relative", {}, 1000, 1.0),
        ("relative", {}, 2090, (1000 / 2090) ** 2),
        ("relative", {"target": 500, "power": 1}, 2000, 0.25),
    ],
)
def test_factor_when_given_the_papers_numbers_then_equals_the_equation(rule, options, staleness, expected):
    normalization = StalenessNormalization(rule, **options)
    assert normalization.factor(staleness) == pytest.approx(expected, rel=1e-12)
    assert normalization.factor(torch.tensor([staleness])).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rule", ["literal", "relative"])
def test_factor_when_staleness_passes_the_target_then_only_the_literal_rule_jumps(rule):
    normalization = StalenessNormalization(rule, target=1000)
    below, above = normalization.factor(1000), normalization.factor(1000.001)
    assert below == 1
    assert above == pytest.approx(1e-6 if rule == "literal" else 1, rel=1e-5)


def test_factor_when_staleness_is_scaled_then_a_large_cluster_trains_as_the_small_one_did():
    """``tau' = delta' tau / delta``: with deviations that grow as the workers, 3 000 of them look like 1 000."""
    plain, scaled = StalenessNormalization("linear"), StalenessNormalization("linear", scale=1000 / 3000)
    for staleness in (3, 300, 3000, 6000):
        assert scaled.factor(staleness) == pytest.approx(plain.factor(staleness / 3))
    # The paper on its Figure 2: 2 tau counts half as much as tau, and no less, whatever the scale.
    assert scaled.factor(3000) / scaled.factor(6000) == pytest.approx(2)
    relative = StalenessNormalization("relative", target=1000, scale=1000 / 3000)
    assert relative.factor(3000) == 1
    assert relative.factor(6000) == pytest.approx(0.25)


@pytest.mark.parametrize(("rule", "options"), [("linear", {}), ("power", {"power": 2}), ("relative", {"target": 5})])
def test_factor_when_weights_change_then_their_staleness_counts_more(rule, options):
    """Equations 5 and 6: ``rho(tau * sigmoid(lambda |dw|))``."""
    normalization = StalenessNormalization(rule, sensitivity=3.0, **options)
    without = StalenessNormalization(rule, **options)
    assert normalization.uses_changes
    assert not without.uses_changes
    for change in (0.0, 0.1, 2.0):
        weight = 1 / (1 + math.exp(-3.0 * change))
        assert normalization.factor(40, change) == pytest.approx(without.factor(40 * weight))
    assert normalization.factor(40, 0.0) == pytest.approx(without.factor(20))  # at rest a half
    assert normalization.factor(40, 1e9) == pytest.approx(without.factor(40))
    rows = torch.tensor([0.0, 0.1, 2.0])
    told = normalization.factor(torch.full((3,), 40), rows)
    assert told.tolist() == pytest.approx([normalization.factor(40, x) for x in rows.tolist()], rel=1e-6)
    with pytest.raises(ValueError, match=r"sensitivity=3.0 needs the last changes"):
        normalization.factor(2)


@pytest.mark.parametrize("rule", STALENESS_RULES)
def test_factor_when_transformed_below_one_then_never_exceeds_one_nor_reaches_zero(rule):
    normalization = StalenessNormalization(rule, target=1, scale=0.01, sensitivity=1.0)
    staleness = torch.tensor([[-3, 0, 1], [2, 50, 100_000]])
    factors = normalization.factor(staleness, torch.zeros(2, 3))
    assert factors.shape == (2, 3)
    assert factors.dtype == torch.float32
    assert bool((factors <= 1).all())
    assert bool((factors > 0).all())
    assert factors[0].tolist() == [1, 1, 1]
    assert bool((factors.flatten().diff() <= 0).all())  # a staler gradient never counts more


def test_factor_when_given_empty_rows_then_is_empty():
    assert StalenessNormalization().factor(torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "square"}, "staleness rule must be one of identity, linear, power, relative, literal, got 'square'"),
        ({"power": 0}, "staleness power must be a finite number above 0, got 0"),
        ({"power": math.inf}, "staleness power must be"),
        ({"target": 0.5}, "staleness target must be a finite number of at least 1"),
        ({"target": math.nan}, "staleness target must be"),
        ({"scale": 0}, "staleness scale must be a finite number above 0, got 0"),
        ({"scale": -1}, "staleness scale must be"),
        ({"sensitivity": -0.1}, "staleness sensitivity must be None or a finite number of at least 0, got -0.1"),
    ],
)
def test_normalization_when_out_of_range_then_says_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        StalenessNormalization(**options)


def test_normalization_when_pickled_then_equals_itself():
    normalization = StalenessNormalization("power", power=3, sensitivity=0.5)
    assert pickle.loads(pickle.dumps(normalization)) == normalization
