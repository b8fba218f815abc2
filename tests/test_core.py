"""Buckets, sequences and sampling parameters: the words the engine plans with."""

from __future__ import annotations

from typing import Any

import pytest
from paged_fake import sequence

from xspec.core.request import SamplingParams
from xspec.core.shapes import Bucket, BucketGrid
from xspec.errors import RequestError


def rows_of(grid: BucketGrid) -> list[int]:
    return [bucket.rows for bucket in grid.buckets]


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_graph_grid(max_rows: int, expected: list[int]) -> None:
    assert rows_of(BucketGrid.graph(max_rows)) == expected


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (36, [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36]),
        (100, [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_fine_grid(max_rows: int, expected: list[int]) -> None:
    assert rows_of(BucketGrid.fine(max_rows)) == expected


def test_fit_is_the_smallest_bucket_that_holds_the_rows() -> None:
    grid = BucketGrid([8, 1, 4, 4])
    assert rows_of(grid) == [1, 4, 8]
    assert [grid.fit(rows) for rows in (1, 2, 4, 5, 8)] == [Bucket(r) for r in (1, 4, 4, 8, 8)]
    assert grid.max_rows == 8
    assert BucketGrid.exact(5).fit(3) == Bucket(3)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_rows_outside_the_grid_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows do not fit a grid that ends at 8"):
        BucketGrid.graph(8).fit(rows)


@pytest.mark.parametrize("rows", [[], [0, 4], [-2]])
def test_a_grid_needs_positive_rows(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="positive row counts"):
        BucketGrid(rows)


def test_limits_of_a_sequence_count_what_is_in_flight() -> None:
    s = sequence(1, [1, 2, 3], max_tokens=4)
    s.tokens = [1, 2, 3, 9, 9]
    assert (s.prompt_len, s.answer_len, s.reserved, s.at_limit) == (3, 2, 5, False)
    s.unseen = 1
    assert (s.reserved, s.at_limit) == (6, False)
    s.unseen = 2
    assert (s.reserved, s.at_limit) == (7, False)  # the rounds in flight may fill it, or may not
    s.sure = 2
    assert (s.reserved, s.at_limit) == (7, True)


def test_a_sequence_prefills_until_its_frontier_meets_the_end() -> None:
    s = sequence(1, [1, 2, 3])
    s.prefill_end, s.submitted = 3, 2
    assert s.prefilling
    s.submitted = 3
    assert not s.prefilling


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, Any]] = [
    ("temperature", -1.0), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", NAN), ("top_p", -0.5),
    ("min_p", -0.1), ("min_p", 1.5), ("min_p", NAN),
    ("top_k", -5), ("top_k", -1), ("top_k", 2.0), ("top_k", True), ("top_k", 2**63),
    ("n", 0), ("n", -1), ("n", 10**9), ("n", 1.0), ("n", True),
    ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.5),
    ("min_tokens", -1), ("min_tokens", NAN), ("min_tokens", 2**63),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", NAN),
    ("presence_penalty", 2.5), ("presence_penalty", NAN), ("frequency_penalty", -2.5),
    ("frequency_penalty", INF), ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", -1),
    ("seed", 1.5), ("seed", "x"), ("stop", "text"), ("stop", ("",)), ("stop", ("a", 3)),
    ("stop_token_ids", (-1,)), ("stop_token_ids", [1]), ("stop_token_ids", ("1",)),
    ("logit_bias", {5: NAN}), ("logit_bias", {5: INF}), ("logit_bias", {"5": 1.0}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", [5]),
    ("speculative", 1), ("speculative", None), ("speculative", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{field: value}).check()
    assert refusal.value.param == field
    assert str(refusal.value).startswith(f"{field} is {value!r}; allowed: ")


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    SamplingParams(max_tokens=3, min_tokens=3).check()
    SamplingParams(max_tokens=None, min_tokens=10**6).check()
    with pytest.raises(RequestError) as refusal:
        SamplingParams(max_tokens=3, min_tokens=4).check()
    assert refusal.value.param == "min_tokens"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, min_p=1, top_k=2**63 - 1, n=1024, max_tokens=1),
        SamplingParams(temperature=100.0, repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(seed=-(2**70), logprobs=0, prompt_logprobs=20, logit_bias={0: -100, 7: 2.5}),
        SamplingParams(stop=("a", "bc"), stop_token_ids=(0, 5)),
    ],
)
def test_the_edges_of_every_range_are_allowed(params: SamplingParams) -> None:
    params.check()
