"""Calibration settings: reading, writing, and what they mean on an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from cost_measured import geometry, listed, measured, multiples
from hypothesis import given
from hypothesis import strategies as st

from xspec.cost.fit import curves_of, fit_table
from xspec.cost.model import bucket_groups
from xspec.cost.settings import (
    CalibrationSettings,
    ContextInterval,
    Control,
    Point,
    fit_shipped,
    parse_calibration,
    resolve,
    shipped_calibration,
    to_json,
)
from xspec.errors import CalibrationError, ConfigError

VERIFY, STEP = Control.TARGET_VERIFY, Control.DRAFT_STEP
GRID = (1, 2, 4, 8, 16, 32)

DOCUMENT = {
    "model": "additive",
    "request_buckets": [1, 2, 4, 8, 16],
    "contexts": [{"prefill_tokens": 1868, "min_kv_length": 1800, "max_kv_length": 4096}],
    "warmup_steps": 8,
    "window_steps": 32,
    "windows_per_point": 3,
    "token_seed": 1,
}


def reasons(raw: Any) -> list[str]:
    with pytest.raises(CalibrationError) as error:
        parse_calibration(raw, "--flag=/x.json")
    assert str(error.value).startswith("--flag=/x.json is no valid calibration:\n  - ")
    return list(error.value.reasons)


# -- reading --------------------------------------------------------------------------------------


def test_the_document_s_example() -> None:
    assert parse_calibration(DOCUMENT, "x") == CalibrationSettings(
        request_buckets=(1, 2, 4, 8, 16), contexts=(ContextInterval(1868, 1800, 4096),)
    )


def test_nothing_said_is_the_defaults() -> None:
    settings = parse_calibration({}, "x")
    assert settings == CalibrationSettings()
    assert (settings.model, settings.warmup_steps, settings.window_steps) == ("additive", 8, 32)
    assert (settings.windows_per_point, settings.token_seed) == (3, 1)
    assert (settings.uncovered, settings.max_target_rows) == ("full_width", None)


def test_every_mistake_is_told_at_once() -> None:
    found = reasons(
        {
            "modle": "sps",
            "model": "linear",
            "draft_width": True,
            "request_buckets": [4, 4],
            "target_graph_rows": [],
            "contexts": [
                {"prefill_tokens": 0, "min_kv_length": 1, "max_kv": 9},
                {"prefill_tokens": 1, "min_kv_length": 8, "max_kv_length": 7},
                {"prefill_tokens": 1, "min_kv_length": 5, "max_kv_length": 20},
                "x",
            ],
            "warmup_steps": -1,
            "window_steps": 1.5,
            "token_seed": "1",
            "plain_rounds": 1,
            "uncovered": None,
        }
    )
    assert found == [
        'unknown key "modle" (did you mean "model"?)',
        'model: found "linear"; allowed: "sps", "additive"',
        "draft_width: found true; allowed: integers from 1 to 16",
        "request_buckets: found [4, 4]; allowed: a list of different positive integers, not empty",
        "target_graph_rows: found []; allowed: a list of different positive integers, not empty",
        "contexts[0].prefill_tokens: found 0; allowed: integers from 1 to 2147483647",
        'contexts[0]: unknown key "max_kv" (did you mean "max_kv_length"?)',
        "contexts[0]: max_kv_length is missing",
        'contexts[3]: found "x"; allowed: a JSON object',
        "contexts: found KV 8-7; allowed: min_kv_length up to max_kv_length",
        "contexts: found KV 5-20 and KV 8-7, which overlap; allowed: intervals apart",
        "warmup_steps: found -1; allowed: integers from 0 to 2147483647",
        "window_steps: found 1.5; allowed: integers from 1 to 2147483647",
        'token_seed: found "1"; allowed: integers from 0 to 2147483647',
        "plain_rounds: found 1; allowed: true or false",
        'uncovered: found null; allowed: "full_width", "plain"',
    ]


@pytest.mark.parametrize("raw", [[], "x", None, 3])
def test_a_calibration_is_an_object(raw: object) -> None:
    assert reasons(raw) == [f"the whole: found {json.dumps(raw)}; allowed: a JSON object"]


def test_a_key_like_no_other_is_told_with_all_that_are_allowed() -> None:
    (reason,) = reasons({"xyz": 1})
    assert reason.startswith('unknown key "xyz" (allowed: model, draft_width, request_buckets, ')


@pytest.mark.parametrize("bad", [[0], [1, True], [1.0], [[1]], "12", 3, {}, [2**31], [None]])
def test_buckets_are_positive_integers(bad: object) -> None:
    assert len(reasons({"request_buckets": bad})) == 1
    context = {"prefill_tokens": 1, "min_kv_length": 1, "max_kv_length": 9, "request_buckets": bad}
    (reason,) = reasons({"contexts": [context]})
    assert reason.startswith("contexts[0].request_buckets: found ")


@pytest.mark.parametrize("second", [(9, 20), (1, 1), (5, 6), (1, 20)])
def test_overlapping_contexts_are_refused(second: tuple[int, int]) -> None:
    contexts = [
        {"prefill_tokens": 4, "min_kv_length": low, "max_kv_length": high} for low, high in (second, (1, 9))
    ]
    (reason,) = reasons({"contexts": contexts})
    assert "which overlap" in reason and "KV 1-9" in reason


def test_order_of_lists_does_not_matter() -> None:
    contexts = [
        {"prefill_tokens": 40, "min_kv_length": 10, "max_kv_length": 90},
        {"prefill_tokens": 4, "min_kv_length": 1, "max_kv_length": 9},
    ]
    settings = parse_calibration({"contexts": contexts, "request_buckets": [8, 1, 4]}, "x")
    assert settings.request_buckets == (1, 4, 8)
    assert settings.contexts == (ContextInterval(4, 1, 9), ContextInterval(40, 10, 90))


sizes = st.sets(st.integers(1, 200), min_size=1, max_size=5).map(lambda found: tuple(sorted(found)))


@st.composite
def settings_texts(draw: st.DrawFn) -> CalibrationSettings:
    count = draw(st.integers(0, 3))
    edges = sorted(draw(st.sets(st.integers(1, 3000), min_size=2 * count, max_size=2 * count)))
    contexts = tuple(
        ContextInterval(
            draw(st.integers(1, 300) | st.just(edges[2 * i])),
            edges[2 * i],
            edges[2 * i + 1],
            draw(st.none() | sizes),
        )
        for i in range(count)
    )
    return CalibrationSettings(
        model=draw(st.sampled_from(["sps", "additive"])),
        draft_width=draw(st.none() | st.integers(1, 8)),
        request_buckets=draw(st.none() | sizes),
        target_graph_rows=draw(st.none() | sizes),
        contexts=contexts or None,
        warmup_steps=draw(st.integers(0, 9)),
        window_steps=draw(st.integers(1, 40)),
        windows_per_point=draw(st.integers(1, 4)),
        token_seed=draw(st.integers(0, 9)),
        plain_rounds=draw(st.booleans()),
        max_target_rows=draw(st.none() | st.integers(1, 300)),
        uncovered=draw(st.sampled_from(["full_width", "plain"])),
    )


@given(settings_texts())
def test_writing_is_the_inverse_of_reading(settings: CalibrationSettings) -> None:
    text = json.dumps(to_json(settings))
    assert parse_calibration(json.loads(text), "x") == settings


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
known_keys = st.sampled_from(
    [
        *to_json(replace(CalibrationSettings(), draft_width=1, max_target_rows=1)),
        "contexts",
        "request_buckets",
    ]
)
context_like = st.dictionaries(
    st.sampled_from(["prefill_tokens", "min_kv_length", "max_kv_length", "request_buckets"]),
    st.integers(0, 9) | json_values,
)


@given(st.dictionaries(known_keys | st.text(max_size=9), json_values | st.lists(context_like, max_size=3)))
def test_whatever_is_read_is_refused_or_valid(raw: dict[str, Any]) -> None:
    try:
        settings = parse_calibration(raw, "x")
    except CalibrationError as error:
        assert error.reasons
    else:
        assert parse_calibration(to_json(settings), "x") == settings


# -- on an engine: what is measured ---------------------------------------------------------------


def test_verify_points_by_hand() -> None:
    settings = CalibrationSettings(window_steps=4, contexts=(ContextInterval(64, 1, 4096),))
    effective = resolve(settings, geometry(VERIFY, 2, (1, 2)), multiples(2))
    assert effective.points == (
        Point(0, 0, 2, 2),
        Point(0, 2, 2, 2),
        Point(0, 2, 2, 4),
        Point(0, 2, 2, 6),
        Point(0, 0, 1, 1),
        Point(0, 2, 1, 1),
        Point(0, 2, 1, 2),
        Point(0, 2, 1, 3),
    )
    assert effective.target_rows == {1: (1, 2, 3), 2: (2, 4, 6)}
    assert effective.captured_tiers == effective.target_rows
    assert effective.contexts == (ContextInterval(64, 1, 2048, (1, 2)),)
    assert effective.notes == (
        "context 0 (KV 1-4096): max_kv_length capped at the model's context of 2048 tokens",
    )


def test_draft_step_points_by_hand() -> None:
    settings = CalibrationSettings(model="additive", window_steps=4, plain_rounds=False)
    effective = resolve(settings, geometry(STEP, 2, (1, 2)), multiples(2))
    linked = (Point(0, 1, 2, 4), Point(0, 2, 2, 6), Point(0, 1, 1, 2), Point(0, 1, 1, 4), Point(0, 2, 1, 3))
    assert effective.points == (*linked, Point(0, 2, 1, 6))
    assert effective.captured_tiers == {}
    sps = resolve(replace(settings, model="sps", plain_rounds=True), geometry(STEP, 2, (1, 2)), multiples(2))
    assert sps.points == (
        Point(0, 0, 2, 2),
        Point(0, 1, 2, 4),
        Point(0, 2, 2, 6),
        Point(0, 0, 1, 1),
        Point(0, 1, 1, 2),
        Point(0, 2, 1, 3),
    )


def test_links_are_to_the_next_bucket_of_the_same_context() -> None:
    contexts = (ContextInterval(64, 1, 255), ContextInterval(256, 256, 4096, (1, 4)))
    settings = CalibrationSettings(window_steps=2, contexts=contexts)
    effective = resolve(settings, geometry(STEP, 1, (1, 2, 4)), multiples(1))

    def rows(context: int) -> list[tuple[int, int]]:
        mine = [p for p in effective.points if (p.context, p.draft_steps) == (context, 1)]
        return [(p.requests, p.target_rows) for p in mine]

    assert rows(0) == [(4, 8), (2, 4), (2, 8), (1, 2), (1, 4)]
    assert rows(1) == [(4, 8), (1, 2), (1, 8)]


def test_rows_above_the_most_are_left_out() -> None:
    settings = CalibrationSettings(model="sps", window_steps=2, max_target_rows=8)
    effective = resolve(settings, geometry(STEP, 3, (1, 2, 4, 16)), multiples(3))
    assert [(p.draft_steps, p.requests, p.target_rows) for p in effective.points] == [
        (0, 4, 4),
        (1, 4, 8),
        (0, 2, 2),
        (1, 2, 4),
        (2, 2, 6),
        (3, 2, 8),
        (0, 1, 1),
        (1, 1, 2),
        (2, 1, 3),
        (3, 1, 4),
    ]
    assert effective.request_buckets == (1, 2, 4)
    assert effective.notes[0] == "request buckets without a point of at most 8 rows: 16"


def test_draft_steps_are_measured_up_to_128_requests() -> None:
    buckets, room = (64, 128, 144, 256), {"cache_tokens": 10**6}
    steps = resolve(CalibrationSettings(), geometry(STEP, 1, buckets, **room), multiples(1))
    verify = resolve(CalibrationSettings(), geometry(VERIFY, 1, (64, 128, 256), **room), multiples(1))
    assert steps.request_buckets == (64, 128)
    assert verify.request_buckets == (64, 128, 256)
    with pytest.raises(CalibrationError, match="none up to 128 is captured"):
        resolve(CalibrationSettings(), geometry(STEP, 1, (144,), **room), multiples(1))


def test_listed_rows_are_measured_where_they_are_captured() -> None:
    tiers = listed((2, 4, 8), 3)
    settings = CalibrationSettings(window_steps=2, target_graph_rows=(2, 4, 8, 16))
    effective = resolve(settings, geometry(VERIFY, 3, (1, 2, 4)), tiers)
    assert effective.target_rows == {1: (2, 4), 2: (2, 4, 8), 4: (4, 8, 16)}
    fewer = resolve(replace(settings, target_graph_rows=(4, 8, 16)), geometry(VERIFY, 3, (1, 2, 4)), tiers)
    assert fewer.target_rows == {1: (4,), 2: (4, 8), 4: (4, 8, 16)}
    assert fewer.captured_tiers == effective.captured_tiers


# -- on an engine: room ---------------------------------------------------------------------------


def prefill_of(control: Control, width: int, buckets: tuple[int, ...], **changes: int) -> int:
    effective = resolve(CalibrationSettings(), geometry(control, width, buckets, **changes), multiples(width))
    return effective.contexts[0].prefill_tokens


def test_the_default_prefill_leaves_room_for_the_worst_case() -> None:
    """(8 + 3 x 32 + 2) rounds of 6 tokens are 636."""
    assert prefill_of(VERIFY, 5, (1,), max_model_len=8192) == 2048
    assert prefill_of(VERIFY, 5, (1,), max_model_len=2684) == 2048
    assert prefill_of(VERIFY, 5, (1,), max_model_len=2683) == 2047
    assert prefill_of(VERIFY, 5, (1,), max_model_len=637) == 1
    assert prefill_of(VERIFY, 5, (1,), max_model_len=8192, slots=1) == 2048
    assert prefill_of(VERIFY, 5, (1,), max_model_len=2683, slots=1) == 2048


def test_the_default_prefill_leaves_room_in_whole_pages() -> None:
    """32 requests: 1,000 pages of 16 are 31 each, 496 tokens, and (8 + 96 + 2) x 3 = 318 are progress."""
    assert prefill_of(STEP, 2, (1, 32), max_model_len=8192, cache_tokens=16007, block_size=16) == 178


def test_default_contexts_cover_up_to_4096() -> None:
    for model_len, covered in ((8192, 4096), (4096, 4096), (1000, 1000)):
        effective = resolve(
            CalibrationSettings(), geometry(VERIFY, 2, (1,), max_model_len=model_len), multiples(2)
        )
        assert (effective.contexts[0].min_kv_length, effective.contexts[0].max_kv_length) == (1, covered)


def refusal(
    settings: CalibrationSettings, control: Control = VERIFY, width: int = 5, **changes: int
) -> list[str]:
    with pytest.raises(CalibrationError) as error:
        resolve(settings, geometry(control, width, GRID, **changes), multiples(width))
    assert isinstance(error.value, ConfigError)
    return list(error.value.reasons)


def test_defaults_without_room_are_refused_with_what_would_fit() -> None:
    """636 tokens is the model's context: one short. 31 window steps are 18 tokens less; 2 windows 192."""
    assert refusal(CalibrationSettings(), max_model_len=636) == [
        "context 0 (KV 1-4096): each request needs 637 tokens (1 of prefill + 6 in each of 8 warmup + 3 x 32 "
        "window steps + 2 rounds in flight), but the model's context holds 636. Give a smaller explicit "
        "configuration (prefill_tokens, window_steps, windows_per_point, warmup_steps, request_buckets); "
        "this would fit: window_steps up to 31, or windows_per_point up to 2"
    ]


def test_a_small_cache_is_refused_with_the_buckets_that_would_fit() -> None:
    """64 pages are 2 for each of 32 requests, 256 tokens; 637 are 5 pages, which 12 requests could have."""
    (reason,) = refusal(CalibrationSettings(), cache_tokens=8192)
    assert "the cache holds 256 for each of 32 requests (8192 tokens in all, in pages of 128)" in reason
    assert reason.endswith("window_steps up to 10, or windows_per_point up to 1, or request_buckets up to 8")


def test_explicit_settings_are_never_reduced() -> None:
    contexts = (ContextInterval(1868, 1800, 4096),)
    settings = CalibrationSettings(contexts=contexts, request_buckets=(1,))
    (reason,) = refusal(settings)
    assert "needs 2504 tokens (1868 of prefill" in reason
    assert "the model's context holds 2048" in reason
    assert reason.endswith("window_steps up to 6, or prefill_tokens up to 1412")
    fits = resolve(settings, geometry(VERIFY, 5, GRID, max_model_len=2504), multiples(5))
    assert fits.contexts == (ContextInterval(1868, 1800, 2504, (1,)),)


def test_sampling_must_stay_in_its_interval() -> None:
    (reason,) = refusal(CalibrationSettings(contexts=(ContextInterval(64, 1, 255),)))
    assert "needs 700 tokens" in reason and "the interval ends at 255" in reason


def test_an_interval_beyond_the_model_is_refused() -> None:
    contexts = (ContextInterval(64, 1, 2048), ContextInterval(2100, 2049, 4096))
    found = refusal(CalibrationSettings(contexts=contexts, window_steps=1))
    assert found[0] == "context 1 (KV 2049-4096): begins beyond the model's context of 2048 tokens"


# -- on an engine: other refusals -----------------------------------------------------------------


def test_everything_that_is_not_captured_is_named_at_once() -> None:
    settings = CalibrationSettings(
        draft_width=7,
        request_buckets=(1, 3, 5, 8),
        target_graph_rows=(1, 2, 7),
        contexts=(ContextInterval(9, 1, 99, (1, 2)), ContextInterval(100, 100, 999, (2,))),
        window_steps=1,
        windows_per_point=1,
    )
    assert refusal(settings) == [
        "draft_width: found 7; allowed: 5, the engine's",
        "request_buckets: 3, 5 not captured; captured: 1, 2, 4, 8, 16, 32",
        "target_graph_rows: 7 not captured for these request buckets; captured for these request buckets: "
        "1, 2, 4, 6, 8, 16, 32, 48",
        "target_graph_rows: 6, the full width of request bucket 1, is missing",
        "target_graph_rows: 48, the full width of request bucket 8, is missing",
        "context 0 (KV 1-99): request_buckets: 2 not among request_buckets; among request_buckets: 1, 8",
        "context 1 (KV 100-999): request_buckets: 2 not among request_buckets; among request_buckets: 1, 8",
        "context 1 (KV 100-999): no request bucket to measure is left",
    ]


def test_full_width_may_only_be_left_out_as_too_large() -> None:
    settings = CalibrationSettings(
        window_steps=1, request_buckets=(1, 2), target_graph_rows=(1, 2, 4, 6), max_target_rows=11
    )
    effective = resolve(settings, geometry(VERIFY, 5, GRID), multiples(5))
    assert effective.target_rows == {1: (1, 2, 4, 6), 2: (2, 4)}
    (reason,) = refusal(replace(settings, max_target_rows=12))
    assert reason == "target_graph_rows: 12, the full width of request bucket 2, is missing"


def test_rows_are_no_choice_of_draft_steps() -> None:
    (reason,) = refusal(CalibrationSettings(target_graph_rows=(6,), window_steps=1), STEP)
    assert reason.startswith("target_graph_rows: only for target verify")


def test_an_unconnected_grid_is_refused_before_anything_is_measured() -> None:
    """1 request has rows 1, 2, 4, 6, and 8 have 8, 16, 32, 48: nothing in common."""
    settings = CalibrationSettings(request_buckets=(1, 8, 16), window_steps=1)
    (reason,) = refusal(settings)
    assert reason.startswith("context 0 (KV 1-2048): the additive model needs request buckets linked by")
    assert "not linked with 5 drafts: 1 | 8, 16." in reason
    resolve(replace(settings, model="sps"), geometry(VERIFY, 5, GRID), multiples(5))


def test_each_context_must_be_connected() -> None:
    contexts = (ContextInterval(64, 1, 255), ContextInterval(256, 256, 2048, (1, 32)))
    (reason,) = refusal(CalibrationSettings(contexts=contexts, window_steps=1))
    assert reason.startswith("context 1 (KV 256-2048)")


def test_longer_contexts_are_measured_after_longer_prompts() -> None:
    contexts = (ContextInterval(64, 70, 255), ContextInterval(255, 256, 2048))
    assert refusal(CalibrationSettings(contexts=contexts, window_steps=1)) == [
        "context 1 (KV 256-2048): prefill_tokens 255 is below the interval"
    ]
    alone = CalibrationSettings(contexts=contexts[:1], window_steps=1)
    effective = resolve(alone, geometry(VERIFY, 5, GRID), multiples(5))
    assert effective.notes == ("context 0 (KV 70-255): prefill_tokens 64 is below the interval",)


def test_something_must_be_left_to_measure() -> None:
    (reason,) = refusal(CalibrationSettings(max_target_rows=1), STEP)
    assert reason == "max_target_rows: 1 leaves no round with drafts to measure"


# -- properties -----------------------------------------------------------------------------------


@st.composite
def engines(draw: st.DrawFn) -> tuple[Any, Any]:
    width = draw(st.integers(1, 7))
    buckets = tuple(sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]), min_size=1))))
    rows = sorted(draw(st.sets(st.integers(1, 100), max_size=12)))
    tiers = draw(st.sampled_from([multiples(width), listed(rows, width), listed(range(1, 200), width)]))
    control = draw(st.sampled_from(Control))
    looped = st.sets(st.tuples(st.integers(1, width), st.integers(1, 3)), max_size=5)
    pairs = draw(looped.map(lambda found: sorted({*found, (width, 1)})) | st.just([(width, None)]))
    found = geometry(
        control,
        width,
        buckets,
        pairs=tuple(pairs) if control is Control.SPEC else (),
        max_model_len=draw(st.integers(64, 5000)),
        cache_tokens=draw(st.integers(1024, 200_000)),
        block_size=draw(st.sampled_from([8, 16, 128])),
        slots=draw(st.integers(1, 2)),
    )
    return found, tiers


@given(settings_texts(), engines(), st.booleans())
def test_what_is_resolved_fits_and_can_be_fitted(
    written: CalibrationSettings, engine: tuple[Any, Any], free: bool
) -> None:
    found, tiers = engine
    settings = replace(written, draft_width=None, window_steps=min(4, written.window_steps))
    if free:  # else hardly any list would be captured, nor any but the first context have room
        lows = [1 + 700 * index for index in range(len(written.contexts or ()))]
        contexts = tuple(ContextInterval(low, low, low + 699) for low in lows) or None
        settings = replace(settings, request_buckets=None, target_graph_rows=None, contexts=contexts)
    try:
        effective = resolve(settings, found, tiers)
    except CalibrationError as error:
        assert error.reasons
        return
    most = settings.max_target_rows or 10**9
    rounds = max(1, settings.warmup_steps) + settings.windows_per_point * settings.window_steps + found.slots
    assert len(set(effective.points)) == len(effective.points)
    for point in effective.points:
        context = effective.contexts[point.context]
        assert point.requests in found.request_buckets and point.target_rows <= most
        assert point.requests in (context.request_buckets or ())
        last = context.prefill_tokens + rounds * (found.draft_width + 1)
        pages = -(-last // found.block_size) * point.requests
        assert last <= min(found.max_model_len, context.max_kv_length)
        assert pages <= found.cache_tokens // found.block_size
        if point.draft_steps and found.control is VERIFY:
            assert point.draft_steps == found.draft_width and point.target_rows in tiers(point.requests)
    for index, context in enumerate(effective.contexts):
        mine = [p for p in effective.points if p.context == index]
        assert [p.requests for p in mine] == sorted((p.requests for p in mine), reverse=True)
        for bucket in context.request_buckets or ():
            full = bucket * (found.draft_width + 1)
            assert full > most or any(
                (p.requests, p.target_rows, p.draft_steps) == (bucket, full, found.draft_width) for p in mine
            )
        for steps in {p.draft_steps for p in mine} - {0}:
            cells = [(p.requests, p.target_rows) for p in mine if p.draft_steps == steps]
            assert effective.model == "sps" or len(bucket_groups(cells)) == 1
    assert resolve(effective.as_settings(), found, tiers) == effective
    assert parse_calibration(to_json(effective.as_settings()), "x") == effective.as_settings()
    table = fit_table(effective, measured(effective), 0.1)
    assert {(p.context, p.draft_steps, p.depth or 0) for p in effective.points} == set(curves_of(table))


# -- what ships -----------------------------------------------------------------------------------

SHIPPED = CalibrationSettings(
    model="sps",
    request_buckets=GRID,
    contexts=(ContextInterval(64, 1, 255), ContextInterval(448, 256, 8192, (1, 4, 16))),
    warmup_steps=2,
    window_steps=3,
    windows_per_point=5,
    max_target_rows=64,
)
"""Like what ships, but of this file: the examples below are worked out for these numbers."""

SHIPPED_ROWS = replace(SHIPPED, model="additive", target_graph_rows=(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))


@pytest.mark.parametrize("control", Control)
def test_the_shipped_calibration_of_cpus(control: Control) -> None:
    """Much quicker than the defaults, longer contexts than theirs, and plain where nothing is measured."""
    settings, defaults = shipped_calibration("cpu", control), CalibrationSettings()
    assert settings is not None and settings.request_buckets and settings.contexts
    engine = geometry(control, 5, settings.request_buckets, max_model_len=8192)
    tiers = listed(settings.target_graph_rows or (), 5)
    ours, theirs = resolve(settings, engine, tiers), resolve(defaults, engine, tiers)
    rounds = [len(each.points) * each.windows_per_point * each.window_steps for each in (ours, theirs)]
    assert 4 * rounds[0] < rounds[1]
    assert settings.warmup_steps >= 1 and settings.windows_per_point >= 3, "one slow window is outvoted"
    assert (settings.plain_rounds, settings.uncovered) == (True, "plain")
    lows = [context.min_kv_length for context in settings.contexts]
    assert lows == [1, *(context.max_kv_length + 1 for context in settings.contexts[:-1])], "no gaps"
    assert theirs.contexts[-1].max_kv_length < ours.contexts[-1].max_kv_length
    assert all(context.prefill_tokens >= context.min_kv_length for context in settings.contexts)


def test_the_shipped_models_and_rows_of_cpus() -> None:
    """Draft steps have one cost for each bucket and depth; with tiers, buckets share target rows."""
    steps, rows = shipped_calibration("cpu", STEP), shipped_calibration("cpu", VERIFY)
    assert steps is not None and rows is not None and rows.target_graph_rows is not None
    assert (steps.model, rows.model) == ("sps", "additive")
    assert max(rows.target_graph_rows) == rows.max_target_rows


def test_nothing_ships_for_other_platforms() -> None:
    assert shipped_calibration("abacus", STEP) is None
    assert shipped_calibration("../pyproject", STEP) is None


@pytest.mark.parametrize("control", Control)
def test_shipped_settings_that_fit_are_left_alone(control: Control) -> None:
    settings = shipped_calibration("cpu", control)
    assert settings is not None
    assert fit_shipped(settings, geometry(control, 5, GRID, max_model_len=8192)) == (settings, ())


def test_shipped_settings_are_cut_to_the_engine() -> None:
    fitted, notes = fit_shipped(SHIPPED_ROWS, geometry(VERIFY, 3, (1, 2, 4, 5), max_model_len=250))
    assert fitted == replace(
        SHIPPED_ROWS,
        request_buckets=(1, 2, 4, 5),
        contexts=(ContextInterval(64, 1, 255),),
        target_graph_rows=(2, 3, 4, 6, 8, 12, 16, 20),
    )
    assert notes == (
        "request buckets left out: [8, 16, 32]",
        "request bucket added: [5], the largest that the engine has room for",
        "context left out: KV 256-8192, beyond the model's 250 tokens",
        "target_graph_rows left out: [24, 32, 48, 64]",
        "target_graph_rows added: [20], full widths",
    )


def test_narrow_drafts_link_sparse_buckets_by_those_between() -> None:
    """With 2 drafts, 1 request has rows up to 3, and 4 have 4 and more."""
    fitted, notes = fit_shipped(SHIPPED_ROWS, geometry(VERIFY, 2, GRID))
    assert fitted.contexts is not None
    assert fitted.contexts[1].request_buckets == (1, 2, 4, 8, 16)
    assert notes == ("request buckets of KV 256-8192: [1, 2, 4, 8, 16], to share target rows",)
    wide, _ = fit_shipped(SHIPPED_ROWS, geometry(VERIFY, 3, GRID))
    assert wide.contexts is not None and wide.contexts[1].request_buckets == (1, 4, 16)


def test_a_context_without_room_for_its_prompt_joins_the_one_before() -> None:
    """19 rounds of 13 tokens leave 8 of 255 for the first prompt, and 256 of 503 for the second."""
    fitted, notes = fit_shipped(SHIPPED, geometry(STEP, 12, (1,), max_model_len=503))
    assert fitted.contexts == (ContextInterval(8, 1, 255), ContextInterval(256, 256, 8192, (1,)))
    assert notes[-1] == "prefill_tokens 448 (KV 256-8192) reduced to 256"
    fitted, notes = fit_shipped(SHIPPED, geometry(STEP, 12, (1,), max_model_len=502))
    assert fitted.contexts == (ContextInterval(8, 1, 8192),)
    assert notes[-1] == "context left out: KV 256-8192; costs of KV 1-255 hold there too"


@pytest.mark.parametrize(
    ("model_len", "windows", "steps", "prefill"),
    [
        (248, 5, 3, 1),  # (2 + 5 x 3 + 2) rounds of 13 tokens are 247
        (247, 4, 3, 39),  # 208
        (92, 1, 3, 1),  # 91
        (91, 1, 2, 13),  # 78
        (66, 1, 1, 1),  # 65
    ],
)
def test_windows_get_fewer_then_shorter_where_requests_cannot_last(
    model_len: int, windows: int, steps: int, prefill: int
) -> None:
    found = geometry(STEP, 12, (1,), max_model_len=model_len)
    fitted, notes = fit_shipped(SHIPPED, found)
    assert (fitted.windows_per_point, fitted.window_steps) == (windows, steps)
    assert fitted.contexts == (ContextInterval(prefill, 1, 255),)
    note = f"5 windows of 3 rounds a point reduced to {windows} of {steps}"
    assert (note in notes) == (windows < 5)
    resolve(fitted, found, multiples(12))


def test_an_engine_without_room_for_one_round_is_refused_with_the_numbers() -> None:
    found = geometry(STEP, 12, (1,), max_model_len=65)
    fitted, _ = fit_shipped(SHIPPED, found)
    with pytest.raises(CalibrationError, match="each request needs 66 tokens .* context holds 65"):
        resolve(fitted, found, multiples(12))


def test_request_buckets_without_room_in_the_cache_give_way() -> None:
    """One window of one round takes 1 + 5 x 6 = 31 tokens: 2 pages of 16, of which there are 50. The largest
    bucket left, 24, lasts for 32 tokens: a prompt of 2."""
    found = geometry(STEP, 5, (*GRID[:-1], 24, 32), cache_tokens=800, block_size=16)
    fitted, notes = fit_shipped(SHIPPED, found)
    assert fitted.request_buckets == (1, 2, 4, 8, 16, 24)
    assert (fitted.windows_per_point, fitted.window_steps) == (1, 1)
    assert notes[:2] == (
        "request buckets left out: [32]",
        "request bucket added: [24], the largest that the engine has room for",
    )
    assert resolve(fitted, found, multiples(5)).contexts[0].prefill_tokens == 2


@given(
    st.sampled_from(Control),
    st.integers(1, 16),
    st.integers(1, 70),
    st.integers(1, 9000),
    st.integers(1, 20_000),
    st.sampled_from([8, 16, 128]),
)
def test_shipped_settings_resolve_on_any_engine(
    control: Control, width: int, lanes: int, model_len: int, cache_tokens: int, block_size: int
) -> None:
    """Whatever --max_seqs_per_batch, width, --max_model_len and cache are: what a request needs at least, 1
    token of prompt and 2 + 1 + 2 rounds, is refused only to engines that have less."""
    settings = shipped_calibration("cpu", control)
    assert settings is not None and settings.request_buckets is not None and settings.contexts is not None
    buckets = sorted({*(b for b in (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64) if b < lanes), lanes})
    found = geometry(
        control, width, buckets, max_model_len=model_len, cache_tokens=cache_tokens, block_size=block_size
    )
    least = 1 + (settings.warmup_steps + 1 + found.slots) * (width + 1)
    pages, needed = cache_tokens // block_size, -(-least // block_size)
    roomy = [bucket for bucket in buckets if bucket * needed <= pages and least <= model_len]
    fitted, notes = fit_shipped(settings, found)
    tiers = listed(settings.target_graph_rows or (), width)
    if not roomy:
        with pytest.raises(CalibrationError, match=f"each request needs {least} tokens"):
            resolve(fitted, found, tiers)
        return
    effective = resolve(fitted, found, tiers)
    assert {p.requests for p in effective.points} <= set(roomy)
    assert min(roomy[-1], max(settings.request_buckets)) in effective.request_buckets
    assert effective.contexts[0].min_kv_length == 1
    assert effective.contexts[-1].max_kv_length == min(model_len, settings.contexts[-1].max_kv_length)
    shorter = (effective.windows_per_point, effective.window_steps) != (
        settings.windows_per_point,
        settings.window_steps,
    )
    assert shorter == any("rounds a point reduced to" in note for note in notes)
