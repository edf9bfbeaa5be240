"""What members that live agree on when a death has cut their averaging off."""

import pytest

from lightning_recsys.sync import Report, decide


def test_decision_when_some_have_folded_the_last_round_in_then_the_others_get_it():
    decision = decide([Report(3, folded=7), Report(0, folded=6), Report(2, folded=7)])
    assert decision.members == (0, 2, 3)
    assert (decision.folded, decision.source, decision.lags) == (7, 2, True)
    assert not decision.stops
    assert not decision.joins


def test_decision_when_nobody_has_folded_the_last_round_in_then_it_is_forgotten():
    decision = decide([Report(0, folded=6), Report(2, folded=6)])
    assert (decision.folded, decision.source, decision.lags) == (6, 0, False)


def test_decision_when_one_has_seen_that_all_want_to_stop_then_all_stop_and_a_broken_group_is_given_up():
    assert decide([Report(0, folded=6), Report(2, folded=6, has_stopped=True)]).stops
    assert not decide([Report(0, folded=6), Report(2, folded=6, has_stopped=True)]).is_whole
    assert decide([Report(0, folded=6, has_stopped=True), Report(2, folded=6, has_stopped=True)]).is_whole


def test_decision_when_a_member_is_new_then_another_one_tells_it_what_it_lacks():
    decision = decide([Report(0, folded=6), Report(3, folded=None), Report(4, folded=5)])
    assert decision.members == (0, 3, 4)
    assert (decision.folded, decision.source, decision.lags, decision.joins) == (6, 0, True, True)


def test_decision_when_reports_cannot_be_then_is_refused():
    with pytest.raises(ValueError, match="none can be more than one round behind"):
        decide([Report(0, folded=6), Report(2, folded=4)])
