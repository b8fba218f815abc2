"""Probing the real pipeline under a made-up clock: what is measured, and that nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from calib_fake import CostOf, Device, Rig, answers, effective_of, make_rig

from xspec.calib.probe import Measured, probe
from xspec.core.round import RoundPlan
from xspec.core.shapes import TargetTiers
from xspec.cost.schema import MOST_ADDED
from xspec.cost.settings import ContextInterval, Point
from xspec.errors import ConfigError, EngineError
from xspec.exec.driver import Retirement
from xspec.exec.slots import Slot
from xspec.platform.base import Event
from xspec.progress import silent

TIERS = TargetTiers({(2, 2): [3, 4, 12], (4, 2): [8]})
CONTEXTS = (ContextInterval(20, 1, 90), ContextInterval(100, 91, 200))
WARMUP_STEPS = 3
WIDE = (ContextInterval(20, 1, 400), ContextInterval(100, 401, 500))
POINTS = [
    Point(0, 0, 1, 1), Point(0, 1, 1, 2), Point(0, 2, 1, 3),
    Point(0, 0, 4, 4), Point(0, 2, 4, 12), Point(0, 2, 4, 8),
    Point(0, 2, 2, 4), Point(0, 2, 2, 12),
    Point(1, 0, 2, 2), Point(1, 2, 2, 6), Point(1, 2, 2, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calib")


@pytest.fixture(scope="module")
def rig(folder: Path) -> Rig:
    return make_rig(folder, tiers=TIERS)


def key_of(plan: RoundPlan) -> tuple[int, int, int] | None:
    """What a round decodes; None: only prompts."""
    if not plan.batch.rows:
        return None
    return plan.spec.draft_steps, len(plan.batch.rows), plan.shape.target_rows


def point_key(point: Point) -> tuple[int, int, int]:
    return point.draft_steps, point.requests, point.target_rows


def point_ms(point: Point) -> float:
    return 10.0 + 100.0 * point.draft_steps + point.requests + point.target_rows / 64


def cost_ms(plan: RoundPlan) -> float:
    """Another for every shape, and for rounds of prompts."""
    key = key_of(plan)
    return 0.5 * plan.shape.prefill_tokens if key is None else point_ms(Point(0, *key))


def measure(
    rig: Rig,
    device: Device,
    points: list[Point] = POINTS,
    contexts: tuple[ContextInterval, ...] = CONTEXTS,
    token_seed: int = 1,
) -> Measured:
    service = rig.service(device)
    assert not service.scheduler.pages.prefix_cache
    measured = probe(service, effective_of(points, contexts, token_seed=token_seed), silent)
    assert service.scheduler.idle and service.pipeline.empty
    service.scheduler.pages.check_integrity()
    assert service.scheduler.pages.available == service.scheduler.pages.pages
    return measured


def check_exact(measured: Measured, points: list[Point], windows: int) -> None:
    """Samples in the points' order, every window exactly what rounds of the point take."""
    assert [Point(s.context, s.draft_steps, s.requests, s.target_rows) for s in measured.samples] == points
    for point, sample in zip(points, measured.samples, strict=True):
        assert sample.windows_ms == pytest.approx([point_ms(point)] * windows, rel=1e-9), point


@pytest.mark.parametrize("overlap", [True, False], ids=["two slots", "one slot"])
def test_samples_are_exactly_what_rounds_of_the_point_take(rig: Rig, folder: Path, overlap: bool) -> None:
    if not overlap:
        rig = make_rig(folder, tiers=TIERS, enable_schedule_overlap=False)
    measured = measure(rig, rig.device(cost_ms))
    check_exact(measured, POINTS, windows=3)
    assert measured.prefill_ms_per_token == pytest.approx(0.5, rel=1e-9)
    for sample in measured.samples:
        low, high = (20, 90) if sample.context == 0 else (100, 200)
        assert low < sample.kv_length < high


def transient_cost() -> CostOf:
    """As `cost_ms`, but ruinous for rounds that must not count: warmup, and the first after any switch."""
    seen: dict[tuple[int, ...], int] = {}
    last: list[object] = [None]

    def cost(plan: RoundPlan) -> float:
        key = key_of(plan)
        if key is None:
            first = last[0] is not None
            last[0] = None
            return 1e6 if first else cost_ms(plan)
        seen[key] = seen.get(key, 0) + 1
        switched, last[0] = last[0] != key, key
        return 1e6 if switched or seen[key] <= WARMUP_STEPS else cost_ms(plan)

    return cost


def test_warmup_and_the_first_round_after_a_switch_are_never_sampled(rig: Rig) -> None:
    points = POINTS[:8]  # of one context, so that a shape is one point
    device = rig.device(transient_cost())
    measured = measure(rig, device, points)
    check_exact(measured, points, windows=3)
    assert len(fills(device)) > 1
    assert measured.prefill_ms_per_token == pytest.approx(0.5, rel=1e-9), (
        "the first of a filling does not count"
    )


def test_rounds_are_counted_by_hand(rig: Rig) -> None:
    """A point: 3 of warmup + 4, then twice 1 + 4 = 17. Four requests leave, then two: 1 round behind each."""
    device = rig.device(cost_ms)
    measure(rig, device, POINTS[:8], contexts=WIDE)
    keys = [key_of(plan) for plan in device.plans]
    runs = [(key, len(list(run))) for key, run in groupby(keys)]
    four = [(0, 4, 4), (2, 4, 12), (2, 4, 8)]
    two = [(2, 2, 4), (2, 2, 12)]
    one = [(0, 1, 1), (1, 1, 2), (2, 1, 3)]
    expected = [(None, 3)]  # 4 x 20 prompt tokens, 32 a round
    for bucket in (four, two, one):
        turns = [(key, 7) for key in bucket] + [(key, 5) for key in bucket] * 2
        expected += [*turns[:-1], (turns[-1][0], 6)]
    assert runs == expected
    assert sum(count for _, count in runs) == 3 + 8 * 17 + 3


def test_the_same_rounds_with_the_same_prompts_every_time(rig: Rig) -> None:
    one, two, other = rig.device(cost_ms), rig.device(lambda plan: 1.0), rig.device(cost_ms)
    measure(rig, one, contexts=WIDE)
    measure(rig, two, contexts=WIDE)
    measure(rig, other, contexts=WIDE, token_seed=2)
    assert [(p.spec, p.batch, p.shape) for p in one.plans] == [(p.spec, p.batch, p.shape) for p in two.plans]

    def prompts(device: Device) -> list[tuple[int, ...]]:
        return [bind.token_ids for plan in device.plans for bind in plan.binds]

    assert prompts(one) == prompts(two) != prompts(other)
    assert [len(prompt) for prompt in prompts(one)] == [20] * 4 + [100] * 2
    assert len(set(prompts(one))) == 6
    tokens = [token for prompt in prompts(one) for token in prompt]
    assert min(tokens) >= 0 and max(tokens) < rig.parts.target.spec.vocab_size
    binds = [bind for plan in one.plans for bind in plan.binds]
    assert all(bind.params.greedy and bind.stop_ids == () and bind.hit_page is None for bind in binds)


def slowed(factor: Callable[[int], float]) -> CostOf:
    """As `cost_ms`, but rounds of the point (2, 4, 12) take a multiple, by how many of them went before."""
    seen = [0]

    def cost(plan: RoundPlan) -> float:
        if key_of(plan) != (2, 4, 12):
            return cost_ms(plan)
        seen[0] += 1
        return cost_ms(plan) * factor(seen[0] - 1)

    return cost


BUSY = [Point(0, 0, 4, 4), Point(0, 2, 4, 12)]
SOUND_MS = point_ms(BUSY[1])
FIRST, LATER = 7, 5
"""Rounds of a window: 3 of warmup and 4 that count, then 1 and 4."""


def rounds_of(device: Device, point: Point) -> int:
    return sum(key_of(plan) == point_key(point) for plan in device.plans)


def test_a_slow_round_in_each_window_changes_nothing(rig: Rig) -> None:
    """A window is the median of its four rounds."""
    device = rig.device(slowed(lambda index: 3.0 if index in (5, 8, 16) else 1.0))
    check_exact(measure(rig, device, BUSY, contexts=WIDE), BUSY, windows=3)
    assert rounds_of(device, BUSY[1]) == FIRST + 2 * LATER + 1


def test_one_slow_window_of_three_is_outvoted(rig: Rig) -> None:
    device = rig.device(slowed(lambda index: 3.0 if FIRST <= index < FIRST + LATER else 1.0))
    sample = measure(rig, device, BUSY, contexts=WIDE).samples[1]
    assert sample.windows_ms == pytest.approx((SOUND_MS, 3 * SOUND_MS, SOUND_MS))
    assert sample.median_ms == pytest.approx(SOUND_MS) and sample.spread == pytest.approx(0.0)
    assert rounds_of(device, BUSY[1]) == FIRST + 2 * LATER + 1


@pytest.mark.parametrize(("factors", "kept"), [((4.0, 1.0), (1.0,)), ((4.0, 2.0, 1.0), (2.0, 1.0))])
def test_the_slowest_window_is_measured_again_and_replaced(
    rig: Rig, factors: tuple[float, ...], kept: tuple[float, ...]
) -> None:
    """One slow window of two lifts the median, of three it takes two. Then all is well, and no other point
    is measured again."""

    def factor(index: int) -> float:
        window = 0 if index < FIRST else 1 + (index - FIRST) // LATER
        return factors[window] if window < len(factors) else 1.0

    device = rig.device(slowed(factor))
    effective = effective_of(BUSY, WIDE, windows_per_point=len(factors))
    other, sample = probe(rig.service(device), effective, silent).samples
    assert sample.windows_ms == pytest.approx([each * SOUND_MS for each in (*kept, 1.0)])
    assert other.windows_ms == pytest.approx([point_ms(BUSY[0])] * len(factors))
    once = FIRST + (len(factors) - 1) * LATER
    assert rounds_of(device, BUSY[0]) == once
    assert rounds_of(device, BUSY[1]) == once + 1 + LATER + 1, "each time one round lets all before it retire"


def test_a_point_that_stays_disturbed_is_given_up_after_as_many_windows(rig: Rig) -> None:
    device = rig.device(slowed(lambda index: 1.0 if index < FIRST else 3.0))
    sample = measure(rig, device, BUSY, contexts=WIDE).samples[1]
    assert sample.windows_ms == pytest.approx((SOUND_MS, 3 * SOUND_MS, 3 * SOUND_MS))
    assert sample.spread == pytest.approx(2.0)
    assert rounds_of(device, BUSY[1]) == FIRST + 2 * LATER + 1 + 3 * (LATER + 1)


def test_what_rounds_bring_is_delivered_behind_the_next(rig: Rig) -> None:
    """All of it once, and none while no later round is in flight but at the end."""
    device = rig.device(cost_ms)
    service = rig.service(device)
    got: list[tuple[str, int]] = []
    behind: list[bool] = []

    def deliver(retirement: Retirement) -> None:
        assert retirement.feedback is not None
        got.extend((output.request_id, len(output.token_ids)) for output in retirement.outputs)
        behind.append(not service.pipeline.empty)

    probe(replace(service, deliver=deliver), effective_of([Point(0, 0, 2, 2)], WIDE[:1]), silent)
    decoded = sum(plan.shape.prefill_tokens == 0 for plan in device.plans)
    assert sum(tokens for _, tokens in got) == 2 * decoded + 2  # the prompts brought a token each
    assert {request for request, _ in got} == {"calibration-1", "calibration-2"}
    assert behind == sorted(behind, reverse=True)
    assert 1 <= behind.count(False) <= service.slots


def test_points_of_short_rounds_get_more_windows(rig: Rig) -> None:
    """Four rounds of the point take a window; only until its windows add up to what is asked."""
    short, long = point_ms(BUSY[0]), point_ms(BUSY[1])
    assert short < long
    device = rig.device(cost_ms)
    wanted = round(4 * 3 * short) + 1  # three windows are too short, of the other point they are long enough
    assert 4 * 3 * long > wanted
    effective = effective_of(BUSY, WIDE, least_point_ms=wanted)
    more, usual = probe(rig.service(device), effective, silent).samples
    assert more.windows_ms == pytest.approx([short] * 4)
    assert usual.windows_ms == pytest.approx([long] * 3)


def test_no_point_gets_windows_without_end(rig: Rig) -> None:
    effective = effective_of(BUSY[:1], WIDE, least_point_ms=10**6)
    (sample,) = probe(rig.service(rig.device(cost_ms)), effective, silent).samples
    assert len(sample.windows_ms) == 3 * (1 + MOST_ADDED)


@pytest.mark.parametrize("factor", [1.19, 1.21])
def test_windows_may_differ_by_a_fifth(rig: Rig, factor: float) -> None:
    device = rig.device(slowed(lambda index: 1.0 if index < FIRST else factor))
    measure(rig, device, BUSY, contexts=WIDE)
    assert (rounds_of(device, BUSY[1]) > FIRST + 2 * LATER + 1) == (factor > 1.2)


def test_windows_measured_again_keep_within_the_context(rig: Rig) -> None:
    """Prompts are read afresh for them as for all others: 3 + 4 rounds end at 28 tokens, 5 more at 33."""
    device = rig.device(cost_ms)
    device.cost_ms = lambda plan: cost_ms(plan) * (3.0 if len(device.plans) > 12 else 1.0)
    (sample,) = measure(rig, device, [Point(0, 0, 4, 4)], contexts=(ContextInterval(20, 1, 33),)).samples
    assert sample.spread == pytest.approx(2.0) and 20 < sample.kv_length < 33
    assert len(fills(device)) > 2 and set(fills(device)) == {4}


def fills(device: Device) -> list[int]:
    """Prompts begun by each filling."""
    begun: list[int] = []
    prompts = False
    for plan in device.plans:
        if plan.binds and not prompts:
            begun.append(0)
        prompts = not plan.batch.rows
        begun[-1] += len(plan.binds)
    return begun


def test_a_context_that_fills_up_is_filled_afresh(rig: Rig) -> None:
    """A plain round commits one token. The first window takes 7 rounds from 21 tokens on, to 28; the second
    5, to 33; the third would end at 38."""
    device = rig.device(cost_ms)
    points = [Point(0, 0, 4, 4)]
    measured = measure(rig, device, points, contexts=(ContextInterval(20, 1, 33),))
    check_exact(measured, points, windows=3)
    assert fills(device) == [4, 4]
    # Ends of the rounds that count: 25 to 28, then 30 to 33; with new prompts 23 to 26.
    assert measured.samples[0].kv_length == pytest.approx((26.5 + 31.5 + 24.5) / 3)


def test_a_context_without_room_for_a_window_is_measured_beyond_its_end(rig: Rig) -> None:
    device = rig.device(cost_ms)
    points = [Point(0, 0, 4, 4), Point(0, 2, 4, 12)]
    check_exact(measure(rig, device, points, contexts=(ContextInterval(20, 1, 24),)), points, windows=3)
    assert fills(device) == [4]


@pytest.mark.parametrize("pages", [4 * 6, 4 * 7])
def test_pages_that_run_out_are_filled_afresh_and_nobody_is_preempted(folder: Path, pages: int) -> None:
    """Six pages of 8 a request hold the 21 tokens there are after a prompt and 8 rounds of up to 3, but not
    all windows of a point."""
    rig = make_rig(folder, tiers=TIERS, pages=pages, max_model_len=100)
    device = rig.device(cost_ms)
    points = [Point(0, 2, 4, 12), Point(0, 0, 4, 4)]
    service = rig.service(device)
    assert service.scheduler.pages.pages == pages
    measured = probe(service, effective_of(points, (ContextInterval(20, 1, 90),)), silent)
    check_exact(measured, points, windows=3)
    assert service.scheduler.counters.preemptions == 0
    assert len(fills(device)) > 1 and set(fills(device)) == {4}


@pytest.mark.parametrize(
    ("prefill", "requests", "pages", "words"),
    [
        # 1 token is drawn after the prompt, 8 rounds may commit 3 each; a sequence of 504 would end.
        (479, 1, 80, ["8 rounds", "KV length of 504", "max_model_len is 504", "window_steps"]),
        # 26 tokens, 7 rounds of up to 3, and 2 positions more that the last one writes: 49
        (25, 4, 27, ["take 28 pages", "the cache has 27 pages"]),
        (40, 4, 23, ["4 prompts of 40 tokens", "the cache has 23 pages of 8 tokens"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    folder: Path, prefill: int, requests: int, pages: int, words: list[str]
) -> None:
    rig = make_rig(folder, tiers=TIERS, pages=pages, max_model_len=504 if pages == 80 else 100)
    service = rig.service(rig.device(cost_ms))
    points = [Point(0, 2, requests, 3 * requests)]
    with pytest.raises(ConfigError) as caught:
        probe(service, effective_of(points, (ContextInterval(prefill, 1, 900),)), silent)
    assert all(word in str(caught.value) for word in words), caught.value
    assert service.scheduler.pages.available == service.scheduler.pages.pages


class Failing(Device):
    """Loses the round of one shape at its third turn."""

    turns = 0

    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        if key_of(plan) == (2, 2, 4):
            self.turns += 1
            if self.turns == 3:
                raise RuntimeError("out of luck")
        return super().execute(plan, slot)


class Poisoned(Device):
    """One shape yields logits that are not finite."""

    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        event = super().execute(plan, slot)
        if key_of(plan) == (2, 2, 4):
            slot.decoded.told.counts.zero_()
            slot.decoded.told.bad.fill_(True)
        return event


@pytest.mark.parametrize(
    ("device", "words"), [(Failing, "a round was lost: out of luck"), (Poisoned, "not finite")]
)
def test_a_lost_round_names_its_point_and_leaves_nothing_behind(
    rig: Rig, device: type[Device], words: str
) -> None:
    service = rig.service(device(rig.parts.runner, cost_ms))
    with pytest.raises(EngineError, match="draft steps 2, 2 requests, 4 target rows, context 0") as caught:
        probe(service, effective_of(POINTS, CONTEXTS), silent)
    assert words in str(caught.value)
    assert service.scheduler.idle and service.pipeline.empty
    assert service.scheduler.pages.available == service.scheduler.pages.pages


def test_a_round_that_runs_as_something_else_is_no_sample(rig: Rig) -> None:
    """5 target rows are not prepared for two requests: they run padded to 6."""
    service = rig.service(rig.device(cost_ms))
    with pytest.raises(EngineError, match="2 requests, 5 target rows.*on 2 draft rows, 6 target rows"):
        probe(service, effective_of([Point(0, 2, 2, 5)], CONTEXTS), silent)


def test_prompts_that_fit_one_round_are_measured_on_purpose(rig: Rig) -> None:
    device = rig.device(cost_ms)
    measured = measure(rig, device, [Point(0, 0, 1, 1)], contexts=(ContextInterval(9, 1, 90),))
    assert measured.prefill_ms_per_token == pytest.approx(0.5, rel=1e-9)
    prefills = [plan.shape.prefill_tokens for plan in device.plans if key_of(plan) is None]
    assert prefills[0] == 9 and sum(prefills[1:]) == 11 * 9  # 3 rounds of 32 tokens take 11 prompts


@pytest.mark.parametrize("busy", [False, True], ids=["sound", "disturbed"])
def test_progress_goes_up_to_its_end_in_few_calls(rig: Rig, busy: bool) -> None:
    calls: list[tuple[str, int, int]] = []
    device = rig.device(slowed(lambda index: 3.0 if busy and index >= FIRST else 1.0))
    probe(rig.service(device), effective_of(POINTS, WIDE), lambda *call: calls.append(call))
    assert {stage for stage, _, _ in calls} == {"calibrating"}
    done = [count for _, count, _ in calls]
    assert done == sorted(done) and done[0] == 0 and len(calls) <= 202
    assert all(count < total for _, count, total in calls[:-1]) and calls[-1][1] == calls[-1][2]
    assert calls[-2][1] > 0.9 * calls[-2][2], "what was foreseen is about what was done"


def test_text_is_the_same_before_and_after(rig: Rig) -> None:
    prompts = [tuple(range(3, 30)), (5, 6, 7), tuple(range(200, 250))]
    before = answers(rig, prompts)
    measure(rig, rig.device(cost_ms))
    assert answers(rig, prompts) == before
