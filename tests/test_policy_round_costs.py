"""Prices of a batch, which are kept while its requests are about as long."""

from __future__ import annotations

from dataclasses import replace

from looped_world import geometry
from policy_world import view

from xspec.cost.model import CostsAt
from xspec.policy.base import PolicyView
from xspec.policy.batch_costs import SAME_TOKENS
from xspec.policy.round_costs import RoundCosts
from xspec.policy.spec_config import Candidate

CANDIDATES = (Candidate(4, 2), Candidate(8, 3))


class ByLength:
    """A round takes a ms for every token of the longest request; none beyond 1000 is covered."""

    prefill_ms_per_token = 0.0

    def at(self, kv_lengths: list[int]) -> CostsAt | None:
        return None if max(kv_lengths) > 1000 else OfLength(max(kv_lengths))


class OfLength:
    def __init__(self, length: int) -> None:
        self._length = length

    def round_ms(self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None) -> float:
        return float(self._length)


def batch(plan_id: int, *lengths: int) -> PolicyView:
    return replace(view(plan_id, len(lengths)), kv_bounds=lengths)


def price(costs: RoundCosts, plan_id: int, *lengths: int) -> float | None:
    return costs.of(batch(plan_id, *lengths), CANDIDATES).plain_ms


def test_prices_are_kept_for_requests_of_about_the_same_length() -> None:
    costs = RoundCosts(ByLength(), geometry())  # type: ignore[arg-type]
    assert price(costs, 0, 100, 200) == 200.0
    assert price(costs, 1, 100 + SAME_TOKENS, 200 + SAME_TOKENS) == 200.0
    assert price(costs, 2, 101 + SAME_TOKENS, 200 + SAME_TOKENS) == 200.0 + SAME_TOKENS
    assert price(costs, 3, 150) == 150.0  # another number of requests
    assert costs.of(batch(4, 160), CANDIDATES[:1]).spec_ms == (150.0,)  # other candidates
    assert price(costs, 5, 1001) is None


def test_prices_of_long_requests_are_kept_for_an_eighth_of_their_length() -> None:
    costs = RoundCosts(ByLength(), geometry())  # type: ignore[arg-type]
    assert price(costs, 0, 400, 400) == 400.0
    assert price(costs, 1, 400, 500) == 400.0  # an eighth of 800
    assert price(costs, 2, 400, 501) == 501.0


def test_a_plan_asked_for_again_is_priced_as_if_for_the_first_time() -> None:
    """A trace holds the last asking only, and replaying it must price alike."""
    told, replayed = (RoundCosts(ByLength(), geometry()) for _ in range(2))  # type: ignore[arg-type]
    for costs in (told, replayed):
        assert price(costs, 0, 100) == 100.0
    assert price(told, 1, 400) == 400.0
    assert price(told, 1, 390) == price(replayed, 1, 390) == 390.0
    assert price(told, 2, 395) == price(replayed, 2, 395) == 390.0
