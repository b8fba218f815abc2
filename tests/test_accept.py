"""Acceptance against a brute-force reading of the rule, one row at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

from xspec.verify.accept import accept


def expected(draws: list[int], drafts: list[int], limit: int) -> list[int]:
    """Tokens one row commits: walk the draws until a draft disagrees or the limit is reached."""
    committed: list[int] = []
    for step, token in enumerate(draws):
        if len(committed) >= limit:
            break
        committed.append(token)
        if step == len(drafts) or drafts[step] != token:
            break
    return committed


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_every_small_case(k: int) -> None:
    cases = [
        (draws, drafts, limit)
        for draws in itertools.product((5, 6), repeat=k + 1)
        for drafts in itertools.product((5, 6, -1), repeat=k)
        for limit in range(-1, k + 3)
    ]
    draws = torch.tensor([c[0] for c in cases]).reshape(len(cases), k + 1)
    drafts = torch.tensor([c[1] for c in cases], dtype=torch.int64).reshape(len(cases), k)
    result = accept(draws, drafts, torch.tensor([c[2] for c in cases]))
    for row, (d, f, limit) in enumerate(cases):
        want = expected(list(d), list(f), limit)
        assert result.counts[row] == len(want)
        assert result.tokens[row].tolist() == want + [-1] * (k + 1 - len(want))
        assert result.last[row] == (want[-1] if want else d[0])


def test_worked_example() -> None:
    draws = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 9, 9, 9]])
    drafts = torch.tensor([[1, 2, 3], [1, 7, 3], [1, 2, 3], [0, 0, 0]])
    result = accept(draws, drafts, torch.tensor([8, 8, 2, 0]))
    assert result.counts.tolist() == [4, 2, 2, 0]
    assert result.tokens.tolist() == [[1, 2, 3, 4], [1, 2, -1, -1], [1, 2, -1, -1], [-1, -1, -1, -1]]
    assert result.last.tolist() == [4, 2, 2, 9]


def test_inputs_are_left_alone_and_int32_limits_work() -> None:
    draws, drafts = torch.tensor([[3, 4]]), torch.tensor([[3]])
    limits = torch.tensor([1], dtype=torch.int32)
    result = accept(draws, drafts, limits)
    assert (draws.tolist(), drafts.tolist(), limits.tolist()) == ([[3, 4]], [[3]], [1])
    assert result.counts.dtype == torch.int64 and result.tokens.tolist() == [[3, -1]]


def test_no_rows() -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    result = accept(none, none[:, :2], none[:, 0])
    assert result.counts.shape == (0,) and result.tokens.shape == (0, 3) and result.last.shape == (0,)


def test_a_draft_that_was_not_verified_makes_no_token() -> None:
    """Rows of 3, 1 and 2 draws under drafts that are all right: what was not asked cannot be agreed with."""
    draws = torch.tensor([[1, 2, 3], [1, -1, -1], [1, 2, -1]])
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2]])
    result = accept(draws, drafts, torch.tensor([8, 8, 8]))
    assert result.counts.tolist() == [3, 1, 2]
    assert result.tokens.tolist() == [[1, 2, 3], [1, -1, -1], [1, 2, -1]]
    assert result.last.tolist() == [3, 1, 2]
