"""The shipped presets of --adaptive_spec_config; the format itself is `test_spec_config.py`'s."""

from __future__ import annotations

import pytest
from looped_world import LANES

from xspec.cost.looped import acceptance_of, ideal_break_even, rate_of
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.spec_files import PRESETS, check_fit, load_spec_config, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_priors_and_say_where_from(name: str) -> None:
    found = preset(name)
    assert found.provenance.kind == "prior" and "published" in found.provenance.source
    assert found.ranges[0].min_requests == 1
    assert load_spec_config(name) == found
    loops = found.model.loops
    assert loops is not None
    check_fit(found, CandidateGeometry(LANES, tuple(range(1, 17)), tuple(range(1, loops)), loops), name)


def test_nanbeige_drafts_little_because_it_is_below_break_even() -> None:
    """39 % of loop 1's picks are those of loop 2, and d / D is 50 %: for the controller to switch off."""
    found = preset("nanbeige4.2_3b")
    assert max(one.draft_steps for one in found.candidates) <= 2
    assert all(one.acceptance is not None and one.acceptance < 0.5 for one in found.candidates)
    assert all(one.off == ideal_break_even(2, 1) for one in found.candidates)
    assert all(one.initial == 0 for one in found.ranges)


def test_huginn_has_one_published_figure_and_what_follows_from_it() -> None:
    """About 3.5 of 8 drafts of 4 steps are accepted; shorter ones by the rate of a token behind that."""
    rate = rate_of(3.5 / 8, 8)
    for one in preset("huginn_0125").candidates:
        assert one.draft_loops == 4
        assert one.acceptance == pytest.approx(acceptance_of(rate, one.draft_steps), abs=1e-4)


def test_ouro_has_the_published_figures() -> None:
    found = [{c.draft_steps: c.acceptance for c in one.candidates} for one in preset("ouro_1.4b").ranges]
    assert found == [
        {1: 0.984, 2: 0.954, 4: 0.917, 8: 0.874},
        {1: 0.935, 2: 0.911, 4: 0.845},
        {1: 0.935, 2: 0.911},
    ]
