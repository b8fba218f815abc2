"""KV pages as integers: reference counts, a prefix cache by chained block hash, LRU reuse.

Knows nothing about tensors. Page 0 is scratch and never handed out. A page is in exactly one of
three places: held (references > 0), cached (unreferenced but findable by hash) or free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from xspec.core.round import SCRATCH_PAGE


class PageAllocator:
    """Pages 1 .. `pages`, each holding `block_size` tokens."""

    def __init__(self, pages: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if pages < 1 or block_size < 1:
            raise ValueError(f"need at least one page of one token, got {pages} pages of {block_size}")
        self.pages = pages
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * (pages + 1)
        self._free = list(range(pages, SCRATCH_PAGE, -1))  # a stack: recently used memory is warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that an allocation may take, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def used_fraction(self) -> float:
        return 1.0 - self.available / self.pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when there are not enough."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._references[page] = 1
        return page

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page. Later blocks of a prompt are given up for reuse first."""
        for page in reversed(list(pages)):
            self._references[page] -= 1
            if self._references[page] < 0:
                raise AssertionError(f"page {page} was released more often than it was taken")
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def discard(self, pages: Iterable[int]) -> list[int]:
        """Release pages whose content nobody may find again; returns those that nobody holds any more."""
        pages = list(pages)
        for page in pages:
            if self._references[page] == 1 and (key := self._hash_of.pop(page, None)) is not None:
                del self._page_of[key]
        self.release(pages)
        return [page for page in pages if self._references[page] == 0]

    def block_hash(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Hash of one full block in the context of everything before it."""
        data = parent + array("q", tokens).tobytes()
        return hashlib.blake2b(data, digest_size=16).digest()

    def match(self, tokens: Sequence[int], known: list[bytes] | None = None) -> tuple[list[int], list[bytes]]:
        """Pages (now referenced) and hashes of the longest cached run of full blocks of `tokens`.

        At least one token is left to compute, since its logits are what the caller is after. `known`
        remembers hashes of the same tokens (or their beginning) from one attempt to the next.
        """
        known = [] if known is None else known
        pages: list[int] = []
        hashes: list[bytes] = []
        if not self.prefix_cache:
            return pages, hashes
        size = self.block_size
        parent = b""
        for index in range((len(tokens) - 1) // size):
            if index == len(known):
                known.append(self.block_hash(parent, tokens[index * size : (index + 1) * size]))
            parent = known[index]
            page = self._page_of.get(parent)
            if page is None:
                break
            pages.append(page)
            hashes.append(parent)
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
        return pages, hashes

    def publish(self, page: int, block_hash: bytes) -> None:
        """Make a held, fully written page findable. A second page of the same content stays private."""
        if self.prefix_cache and block_hash not in self._page_of and page not in self._hash_of:
            self._page_of[block_hash] = page
            self._hash_of[page] = block_hash

    def check_idle(self) -> None:
        """The books' totals while nobody holds a page, in constant time: the loop asks at every pause."""
        if self.available != self.pages or not len(self._hash_of) == len(self._page_of) == len(self._cached):
            self.check_integrity()
            raise AssertionError("the totals of an idle page allocator do not balance")

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless the books balance; `held` are the page lists of live sequences."""
        expected = [0] * (self.pages + 1)
        for pages in held:
            for page in pages:
                expected[page] += 1
        if expected != self._references:
            wrong = [p for p in range(self.pages + 1) if expected[p] != self._references[p]]
            raise AssertionError(f"reference counts of pages {wrong[:8]} differ from their holders")
        idle = {*self._free, *self._cached}
        if len(idle) != len(self._free) + len(self._cached) or SCRATCH_PAGE in idle:
            raise AssertionError("a page is free twice, or the scratch page was given away")
        if any(self._references[page] for page in idle):
            raise AssertionError("a page is both free and held")
        if len(idle) + sum(1 for count in self._references if count) != self.pages:
            raise AssertionError("pages were lost")
        if {page: key for key, page in self._page_of.items()} != self._hash_of:
            raise AssertionError("the hash maps disagree")
        if any(page not in self._hash_of for page in self._cached):
            raise AssertionError("a cached page cannot be found by hash")
