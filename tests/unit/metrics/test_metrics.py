"""What all metrics share, and the window of normalized entropy."""

import pickle
import warnings

import pytest
import torch

from lightning_recsys.metrics import Calibration, LogLoss, NormalizedEntropy, StreamingAUROC
from lightning_recsys.metrics.functional import normalized_entropy

METRICS = [
    pytest.param(lambda **options: NormalizedEntropy(50, **options), id="normalized entropy"),
    pytest.param(StreamingAUROC, id="auc"),
    pytest.param(LogLoss, id="log loss"),
    pytest.param(Calibration, id="calibration"),
]


def batch(size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(size) - 1
    return logits, (torch.arange(size) % 3 == 0).float()


def states(metric) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in metric.metric_state.items():
        (found[name],) = value if isinstance(value, list) else [value]
    return {name: value.clone() for name, value in found.items()}


def assert_states_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


@pytest.mark.parametrize("make", METRICS)
def test_metric_when_pickled_cloned_and_reset_then_values_follow(make):
    metric, other = make(from_logits=True), make(from_logits=True)
    fresh = states(metric)
    metric.update(*batch())
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        assert_states_equal(states(copy), states(metric))
        assert copy.compute() == metric.compute()
        before = states(metric)
        copy.update(*batch())
        assert_states_equal(states(metric), before)  # the copy shares nothing with the original
    metric.reset()
    assert_states_equal(states(metric), fresh)
    same = batch()
    metric.update(*same)
    other.update(*same)
    assert metric.compute() == other.compute()


@pytest.mark.parametrize("make", METRICS)
def test_metric_in_two_batches_then_it_equals_one_batch(make):
    preds, target = batch(60)
    whole, parts = make(from_logits=True), make(from_logits=True)
    whole.update(preds, target)
    for part in (slice(0, 7), slice(7, 7), slice(7, 60)):  # the second is empty
        parts.update(preds[part], target[part])
    assert parts.compute().item() == pytest.approx(whole.compute().item(), rel=1e-14)


@pytest.mark.parametrize("make", METRICS)
def test_forward_then_it_returns_the_batch_value_and_accumulates(make):
    first, second = batch(), batch()
    metric, alone, both = make(from_logits=True), make(from_logits=True), make(from_logits=True)
    alone.update(*second)
    both.update(*first)
    both.update(*second)
    metric(*first)
    assert metric(*second) == alone.compute()
    assert_states_equal(states(metric), states(both))


@pytest.mark.parametrize("make", METRICS)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "to"])
def test_states_when_the_module_is_cast_then_they_keep_their_precision(make, cast):
    module = torch.nn.Module()
    module.metric = make(from_logits=True)
    module.metric.update(*batch())
    before, value = states(module.metric), module.metric.compute()
    if cast == "to":
        module.to(torch.bfloat16)
    else:
        getattr(module, cast)()
    assert_states_equal(states(module.metric), before)
    module.metric.reset()
    assert {x.dtype for x in states(module.metric).values()} <= {torch.float64, torch.int64}
    module.metric.update(*batch())
    assert module.metric.compute().dtype == value.dtype == torch.float64


@pytest.mark.parametrize("make", METRICS)
def test_metric_on_bfloat16_logits_then_it_is_that_of_the_rounded_logits(make):
    preds, target = batch()
    rounded, widened = make(from_logits=True), make(from_logits=True)
    rounded.update(preds.bfloat16(), target.bfloat16())
    widened.update(preds.bfloat16().double(), target.long())
    assert rounded.compute() == widened.compute()


@pytest.mark.parametrize("make", METRICS)
@pytest.mark.parametrize("from_logits", [True, False])
def test_update_under_autocast_then_it_makes_no_difference(make, from_logits):
    preds, target = batch()
    preds = preds if from_logits else preds.sigmoid()
    plain, autocast = make(from_logits=from_logits), make(from_logits=from_logits)
    plain.update(preds, target)
    with torch.autocast("cpu", torch.bfloat16):
        autocast.update(preds, target)
        assert autocast.compute() == plain.compute()


@pytest.mark.parametrize("make", METRICS)
def test_metric_when_reset_in_inference_mode_then_it_can_be_updated_outside(make):
    metric = make(from_logits=True)
    with torch.inference_mode():
        metric.update(*batch())
        metric.reset()
    metric.update(*batch())
    assert metric.compute().isfinite()


@pytest.mark.parametrize("make", METRICS)
def test_update_when_shapes_differ_then_the_error_names_both(make):
    with pytest.raises(ValueError, match=r"same shape, got \(4, 1\) and \(4,\)\. Squeeze"):
        make(from_logits=True).update(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("make", METRICS)
def test_update_when_logits_are_taken_for_probabilities_then_the_error_says_so(make):
    with pytest.raises(ValueError, match=r"in \[0, 1\], got values from -2 to 0\.5\. Use from_logits=True"):
        make().update(torch.tensor([-2.0, 0.5]), torch.zeros(2))


def test_update_when_weights_have_another_shape_then_it_raises():
    with pytest.raises(ValueError, match=r"weight must have the shape of target, got \(3,\) and \(2,\)"):
        NormalizedEntropy().update(torch.zeros(2), torch.zeros(2), torch.ones(3))


@pytest.mark.parametrize("make", METRICS)
def test_plot_then_it_draws_the_value(make):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    metric = make(from_logits=True)
    metric.update(*batch())
    figure, axis = metric.plot()
    assert axis.lines[0].get_ydata() == pytest.approx([metric.compute().item()])
    pyplot.close(figure)


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("make", METRICS[:2])
def test_compute_on_one_class_then_nan_with_exactly_one_warning(make, label):
    metric = make(from_logits=True)
    metric.update(torch.randn(4), torch.full((4,), label))
    with pytest.warns(UserWarning, match=rf"labels of both classes, got {4 * label:g} positive of 4; ") as caught:
        assert metric.compute().isnan()
    assert len(caught) == 1
    metric.update(torch.randn(4), torch.full((4,), label))
    assert metric.compute().isnan()  # a second warning would be an error here
    metric.reset()
    metric.update(torch.randn(4), torch.full((4,), label))
    assert metric.compute().isnan()


def test_functional_on_one_class_then_nan_with_a_warning():
    with pytest.warns(UserWarning, match="labels of both classes, got 0 positive of 2") as caught:
        assert normalized_entropy(torch.tensor([0.1, 0.2]), torch.zeros(2)).isnan()
    assert len(caught) == 1


def test_calibration_without_positives_then_nan_with_exactly_one_warning():
    metric = Calibration()
    metric.update(torch.tensor([0.5]), torch.zeros(1))
    with pytest.warns(UserWarning, match="needs a positive label") as caught:
        assert metric.compute().isnan()
    assert len(caught) == 1
    metric.update(torch.tensor([0.5]), torch.zeros(1))
    assert metric.compute().isnan()  # a second warning would be an error here


def test_auc_when_a_prediction_is_nan_then_nan_with_a_warning():
    metric = StreamingAUROC(from_logits=True)
    metric.update(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([0.0, 1.0, 1.0]))
    with pytest.warns(UserWarning, match="predictions are NaN"):
        assert metric.compute().isnan()


def test_auc_when_many_pairs_share_a_bin_then_one_warning_tells_the_bound():
    metric = StreamingAUROC(from_logits=True)
    metric.update(torch.arange(1000.0), torch.arange(1000) % 2)
    metric.compute()  # no two of them share a bin: a warning would be an error
    metric.update(torch.zeros(2000), torch.arange(2000) % 2)
    with pytest.warns(UserWarning, match=r"AUC may be off by up to 0\.\d+: .* less than 0\.00049 apart") as caught:
        metric.compute()
    assert len(caught) == 1


def test_auc_when_labels_are_soft_or_weights_of_entropy_negative_then_refused():
    with pytest.raises(ValueError, match="no order with soft labels"):
        StreamingAUROC(from_logits=True).update(torch.zeros(2), torch.tensor([1.0, 0.7]))
    for weight in (-1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="weight must be finite and at least 0, got values from"):
            NormalizedEntropy(from_logits=True).update(*batch(2), torch.tensor([1.0, weight]))


def test_auc_when_its_state_is_loaded_then_goes_on_and_an_earlier_versions_is_read_or_refused():
    logits, target = torch.tensor([-40.0, 0.5, 3.0, -2.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    metric, resumed = StreamingAUROC(64, from_logits=True), StreamingAUROC(64, from_logits=True)
    for each in (metric, resumed):
        each.persistent(True)
    metric.update(logits, target)
    resumed.load_state_dict(metric.state_dict())
    for each in (metric, resumed):
        each.update(logits + 1, target)
    assert_states_equal(states(resumed), states(metric))

    counts = torch.zeros(2, 65, dtype=torch.int64)  # bins of half a logit from -16, then NaN
    counts[0, 38] = counts[1, 33] = counts[1, 28] = 1
    resumed.load_state_dict({"counts": counts})
    fresh = StreamingAUROC(64, from_logits=True)
    fresh.update(torch.tensor([3.0, 0.5, -2.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert_states_equal(states(resumed), states(fresh))
    with pytest.raises(ValueError, match="num_bins=64 to go on with it"):
        StreamingAUROC(128).load_state_dict({"counts": counts})


@pytest.mark.parametrize("metric", [NormalizedEntropy(10, from_logits=True), LogLoss(from_logits=True)])
def test_cross_entropy_when_a_prediction_is_nan_then_nan(metric):
    metric.update(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, 1.0]))
    assert metric.compute().isnan()


@pytest.mark.parametrize(("window_size", "bins"), [(0, 2), (-5, 1)])
def test_constructor_when_a_size_is_too_small_then_it_raises(window_size, bins):
    with pytest.raises(ValueError, match=f"window_size must be at least 1 example.*got {window_size}"):
        NormalizedEntropy(window_size)
    with pytest.raises(ValueError, match=f"num_bins must be at least 2, got {bins - 1}"):
        StreamingAUROC(bins - 1)


def test_window_without_a_window_size_then_it_raises():
    with pytest.raises(ValueError, match="give it a window_size"):
        NormalizedEntropy().window()


def latest(batches, examples: int) -> torch.Tensor:
    """Normalized entropy of the latest whole batches with at least so many examples, from a plain list."""
    chosen, total = [], 0
    for preds, target in reversed(batches):
        chosen.append((preds, target))
        total += len(preds)
        if total >= examples:
            break
    return normalized_entropy(*(torch.cat(x) for x in zip(*chosen, strict=True)), from_logits=True)


@pytest.mark.parametrize(("window_size", "size"), [(6, 6), (12, 6), (13, 6), (2, 6), (300, 6)])
def test_window_when_batches_fill_slots_then_it_is_the_latest_batches(window_size, size):
    metric = NormalizedEntropy(window_size, from_logits=True)
    batches = []
    for _ in range(9):
        batches.append(batch(size))
        metric.update(*batches[-1])
        assert metric.window().item() == pytest.approx(latest(batches, window_size).item(), rel=1e-12)


@pytest.mark.parametrize("window_size", [6, 13, 64, 600, None])
def test_update_with_sizes_then_it_is_one_update_for_each_batch(window_size):
    one_by_one, together = (NormalizedEntropy(window_size, from_logits=True) for _ in range(2))
    for round_sizes in ([6, 1, 0, 9, 3], [4], [2] * 150):  # more batches than the window has slots
        batches = [(*batch(size), torch.rand(size)) for size in round_sizes]
        for each in batches:
            one_by_one.update(*each)
        together.update(*(torch.cat(parts) for parts in zip(*batches, strict=True)), sizes=round_sizes)
        for name, state in states(one_by_one).items():
            torch.testing.assert_close(together.metric_state[name], state, rtol=1e-13, atol=0)


def test_update_when_sizes_do_not_add_up_then_it_raises():
    with pytest.raises(ValueError, match=r"sizes must add up to the 40 examples, got \[20, 19\]"):
        NormalizedEntropy(from_logits=True).update(*batch(), sizes=[20, 19])


@pytest.mark.parametrize("make", METRICS)
@pytest.mark.parametrize("label", [2.0, -1.0, torch.nan])
def test_update_when_a_label_is_none_then_the_error_tells_the_range(make, label):
    with pytest.raises(ValueError, match=r"target must be labels 0 or 1, got values from (-1|0|nan) to (0|2|nan)\."):
        make(from_logits=True).update(torch.zeros(3), torch.tensor([0.0, label, 0.0]))


@pytest.mark.parametrize("size", [1, 3, 40, 700])
def test_window_after_many_batches_then_it_covers_no_less_and_little_more_than_asked(size):
    metric = NormalizedEntropy(1000, from_logits=True)
    covered = 1000 + 1000 / 128 + 2 * size
    for marker in (0.0, 1.0):  # the labels tell old examples from new
        preds = torch.zeros(size)
        for _ in range(-(-int(covered if marker else 2000) // size)):
            metric.update(preds, torch.full((size,), marker))
    assert metric.window().isnan()  # all old ones are gone, so there is one class
    assert 1000 <= metric.window_sums[:, 3].sum() <= 1000 * 129 / 128 + 129 * size
    metric.reset()
    for _ in range(10):
        metric.update(torch.zeros(size), torch.zeros(size))
    for _ in range(-(-1000 // size) - 1):
        metric.update(torch.zeros(size), torch.ones(size))
    assert not metric.window().isnan()  # fewer than 1000 new ones: an old one is still there


def test_state_dict_then_lifetime_and_window_go_on_where_they_stopped():
    metric, resumed = NormalizedEntropy(64, from_logits=True), NormalizedEntropy(64, from_logits=True)
    for _ in range(5):
        metric.update(*batch())
    resumed.load_state_dict(metric.state_dict())
    more = batch(10)
    metric.update(*more)
    resumed.update(*more)
    assert metric.lifetime() == resumed.lifetime()
    assert metric.window() == resumed.window()
    assert metric.window() != metric.lifetime()


def test_metrics_then_they_declare_what_torchmetrics_asks():
    assert [m.higher_is_better for m in (NormalizedEntropy, StreamingAUROC, LogLoss, Calibration)] == [
        False,
        True,
        False,
        None,
    ]
    for metric in (NormalizedEntropy, StreamingAUROC, LogLoss, Calibration):
        assert metric.is_differentiable is False
        assert metric.full_state_update is (metric is NormalizedEntropy)


def test_merge_state_then_counts_add_up():
    first, second, both = (
        StreamingAUROC(from_logits=True),
        StreamingAUROC(from_logits=True),
        StreamingAUROC(from_logits=True),
    )
    for part in (first, second):
        data = batch()
        part.update(*data)
        both.update(*data)
    first.merge_state(second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first.compute() == both.compute()
