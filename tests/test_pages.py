"""Page books: references, prefix matching, LRU reuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xspec.sched.pages import PageAllocator


def published(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """Take pages for `tokens` and publish the full ones, as a computed prompt does."""
    pages, hashes = allocator.match(tokens)
    fresh = allocator.allocate(allocator.pages_for(len(tokens)) - len(pages))
    assert fresh is not None
    pages += fresh
    size = allocator.block_size
    for index in range(len(hashes), len(tokens) // size):
        parent = hashes[-1] if hashes else b""
        hashes.append(allocator.block_hash(parent, tokens[index * size : (index + 1) * size]))
        allocator.publish(pages[index], hashes[-1])
    return pages


def test_a_repeated_prompt_shares_its_full_blocks() -> None:
    allocator = PageAllocator(8, 4)
    first = published(allocator, list(range(10)))
    second, _ = allocator.match(list(range(10)))
    assert second == first[:2]
    allocator.check_integrity([first, second])
    allocator.release(first)
    allocator.release(second)
    allocator.check_integrity()
    assert allocator.available == 8


def test_the_last_token_is_never_served_from_the_cache() -> None:
    allocator = PageAllocator(8, 4)
    allocator.release(published(allocator, list(range(8))))
    pages, _ = allocator.match(list(range(8)))
    assert len(pages) == 1  # two blocks are cached, but the second holds the token to compute
    pages_longer, _ = allocator.match(list(range(9)))
    assert len(pages_longer) == 2


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    allocator = PageAllocator(8, 2)
    allocator.release(published(allocator, [1, 2, 7, 8, 0]))
    pages, _ = allocator.match([3, 4, 7, 8, 0])
    assert pages == []


def test_least_recently_released_pages_are_reused_first_and_tails_before_heads() -> None:
    allocator = PageAllocator(4, 2)
    a = published(allocator, [1, 1, 2, 2])
    b = published(allocator, [3, 3, 4, 4])
    allocator.release(a)
    allocator.release(b)
    assert allocator.allocate(1) == [a[1]]
    assert len(allocator.match([1, 1, 9])[0]) == 1
    assert len(allocator.match([3, 3, 4, 4, 9])[0]) == 2


def test_allocation_is_all_or_nothing() -> None:
    allocator = PageAllocator(3, 4)
    assert allocator.allocate(4) is None
    assert allocator.available == 3
    assert len(allocator.allocate(3) or []) == 3
    assert allocator.used_fraction == 1.0


def test_releasing_twice_is_an_error() -> None:
    allocator = PageAllocator(3, 4)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release(pages)


def test_integrity_check_sees_a_leak() -> None:
    allocator = PageAllocator(3, 4)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        allocator.check_integrity()


def test_an_idle_allocator_is_checked_by_its_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = PageAllocator(6, 2)
    allocator.release(published(allocator, [1, 2, 3, 4, 5]))
    monkeypatch.setattr(allocator, "check_integrity", lambda: None)  # reads every page: too slow for a pause
    allocator.check_idle()
    held = allocator.allocate(1)
    assert held is not None
    with pytest.raises(AssertionError, match="idle"):
        allocator.check_idle()
    allocator.release(held)
    allocator.check_idle()
    allocator._hash_of.popitem()
    with pytest.raises(AssertionError, match="idle"):
        allocator.check_idle()


def test_known_hashes_are_those_of_the_same_blocks() -> None:
    allocator = PageAllocator(8, 2)
    allocator.release(published(allocator, [1, 2, 3, 4, 5, 6, 7]))
    known: list[bytes] = []
    assert allocator.match([1, 2, 3, 4, 9], known) == allocator.match([1, 2, 3, 4, 9])
    assert len(known) == 2
    assert allocator.match([1, 2, 3, 4, 5, 6, 7], known)[1] == known, "an answer has grown meanwhile"
    assert len(known) == 3


def test_without_prefix_cache_nothing_is_found() -> None:
    allocator = PageAllocator(8, 2, prefix_cache=False)
    allocator.release(published(allocator, [1, 2, 3, 4]))
    assert allocator.match([1, 2, 3, 4]) == ([], [])
    allocator.check_integrity()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=40)
)
def test_books_balance_under_any_sequence_of_operations(steps: list[tuple[int, list[int]]]) -> None:
    allocator = PageAllocator(6, 2)
    held: list[list[int]] = []
    for action, tokens in steps:
        if action == 0 and held:
            allocator.release(held.pop(len(tokens) % len(held)))
        elif action == 1 and allocator.available >= allocator.pages_for(len(tokens)):
            held.append(published(allocator, tokens))
        elif action == 2 and held:
            lost = held.pop(len(tokens) % len(held))
            freed = allocator.discard(lost)
            assert set(freed) == set(lost) - {page for pages in held for page in pages}
        allocator.check_integrity(held)
    for pages in held:
        allocator.release(pages)
    allocator.check_integrity()
    assert allocator.available == 6
