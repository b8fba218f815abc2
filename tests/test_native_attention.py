"""Native paged attention against exact softmax: every instruction set, any grouping, page size and length.

A row's bits must not depend on the rows beside it, on the number of threads, or on keys it does not see.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_slab import Rows, attend, bits, interleaved

from xspec.kernels.native import Team

BF16 = torch.bfloat16


class World:
    """Sequences over shuffled pages: plain keys and values to compute from, the native slab to run on."""

    def __init__(
        self, seed: int, *, kv_heads: int, group: int, dim: int, block: int, runs: list[int], longest: int
    ) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.group, self.dim, self.block = group, dim, block
        width = -(-longest // block)
        pages = len(runs) * width
        plain = self.randn(2 * kv_heads, pages + 1, block, dim).to(BF16)
        plain[:, pages] = torch.nan  # where no row may look
        self.pages = torch.randperm(pages, generator=self.generator).view(len(runs), width)
        self.plain, heads = plain, kv_heads * group
        q = self.randn(sum(runs), heads * dim + 32).to(BF16)
        sequences = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
        self.rows = Rows(q, sequences, torch.zeros_like(sequences), self.pages.clone(), heads)
        self.see([length for rows in runs for length in self.lengths(rows, longest)])

    def see(self, kv_lens: Sequence[int]) -> None:
        """So many keys each row; of the page table only what they need names a page of numbers."""
        self.rows.kv_lens.copy_(torch.tensor(kv_lens))
        self.rows.table.copy_(self.pages)
        for sequence in range(len(self.pages)):
            seen = max(1, int(self.rows.kv_lens[self.rows.sequences == sequence].max()))
            self.rows.table[sequence, -(-seen // self.block) :] = self.plain.shape[1] - 1

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def lengths(self, rows: int, longest: int) -> list[int]:
        """Causal, all alike, or any."""
        last = self.random.randint(0, longest)
        match self.random.randrange(3):
            case 0:
                return [max(0, last - rows + 1 + i) for i in range(rows)]
            case 1:
                return [last] * rows
            case _:
                return [self.random.randint(0, longest) for _ in range(rows)]

    def slab(self) -> torch.Tensor:
        return interleaved(self.plain)

    def exact(self, first_key: int = 0) -> torch.Tensor:
        rows, dim = self.rows, self.dim
        out = torch.zeros(len(rows.q), rows.heads, dim, dtype=torch.float64)
        for row, (sequence, length) in enumerate(zip(rows.sequences, rows.kv_lens.tolist(), strict=True)):
            length = max(1, length)
            first = min(first_key, length - 1)
            seen = self.plain[:, self.pages[sequence]].flatten(1, 2)[:, first:length].double()
            keys, values = seen.repeat_interleave(self.group, 0).chunk(2)
            q = rows.q[row, : rows.heads * dim].view(rows.heads, dim, 1).double()
            weights = torch.softmax((keys @ q).squeeze(2) * dim**-0.5, 1)
            out[row] = (weights.unsqueeze(1) @ values).squeeze(1)
        return out.flatten(1)


def close(found: torch.Tensor, exact: torch.Tensor, world: World) -> None:
    """Weights and results are rounded to bf16; a weighted mean stays among the values."""
    largest = world.plain[:, :-1].abs().max().item()
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + largest * 2**-8).all()


SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13]),
        "dim": st.sampled_from([32, 64, 96, 128, 256]),
        "block": st.sampled_from([16, 32, 48]),
        "runs": st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 9]), min_size=1, max_size=4),
        "longest": st.sampled_from([1, 15, 40, 129, 300]),
    }
)


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, first_key=st.sampled_from([0, 0, 1, 5]), seed=st.integers(0, 99))
def test_equals_exact_softmax(team: Team, shape: dict[str, int], first_key: int, seed: int) -> None:
    world = World(seed, **shape)
    slab = world.slab()
    found = attend(team, world.rows, slab, first_key)
    close(found, world.exact(first_key), world)
    single = Team(team.library, 1, team.isa)
    for row in world.random.sample(range(len(found)), min(3, len(found))):
        alone = attend(single, world.rows.only(slice(row, row + 1)), slab, first_key)
        assert torch.equal(bits(alone[0]), bits(found[row]))


def test_any_company_gives_the_same_bits(team: Team) -> None:
    """Batches cut and shuffled at random, on one to three threads."""
    world = World(1, kv_heads=3, group=3, dim=64, block=16, runs=[1, 8, 40, 2, 5], longest=300)
    slab, count = world.slab(), len(world.rows.q)
    together = attend(team, world.rows, slab)
    for threads in (1, 2, 3):
        other = Team(team.library, threads, team.isa)
        for _ in range(4):
            chosen = torch.randperm(count, generator=world.generator)[: world.random.randint(1, count)]
            assert torch.equal(bits(attend(other, world.rows.only(chosen), slab)), bits(together[chosen]))
            chosen = chosen.sort().values
            assert torch.equal(bits(attend(other, world.rows.only(chosen), slab)), bits(together[chosen]))


def test_prefill_in_any_chunks(team: Team) -> None:
    world = World(2, kv_heads=2, group=4, dim=64, block=32, runs=[200], longest=333)
    world.see(range(134, 334))
    slab = world.slab()
    whole = attend(team, world.rows, slab)
    close(whole, world.exact(), world)
    for size in (1, 7, 64):
        parts = [attend(team, world.rows.only(slice(i, i + size)), slab) for i in range(0, 200, size)]
        assert torch.equal(bits(torch.cat(parts)), bits(whole))


def test_keys_out_of_sight_weigh_nothing(team: Team) -> None:
    """Any finite number there changes no bit, neither in the last page nor before first_key."""
    world = World(3, kv_heads=2, group=3, dim=64, block=16, runs=[3, 1, 4], longest=200)
    clean = attend(team, world.rows, world.slab(), 2)
    for sequence in range(3):
        seen = max(1, int(world.rows.kv_lens[world.rows.sequences == sequence].max()))
        page, token = world.pages[sequence, (seen - 1) // 16], (seen - 1) % 16
        world.plain[:, page, token + 1 :] = -3.3e38
        if min(world.rows.kv_lens[world.rows.sequences == sequence]) > 2:
            world.plain[:, world.pages[sequence, 0], :2] = 3.3e38
    assert torch.equal(bits(attend(team, world.rows, world.slab(), 2)), bits(clean))


def test_zeros_keep_their_sign_whoever_reads_along(team: Team) -> None:
    """A sum that underflowed to -0 stays as it is over a tile that only a neighbour sees."""
    world = World(4, kv_heads=1, group=1, dim=32, block=16, runs=[24], longest=300)
    world.see([16, 300] * 12)
    keys, values = world.plain[:, world.pages[0]].flatten(1, 2)
    keys.zero_()
    keys[0] = 0.40625  # ten times the weight of the others
    values.fill_(1.0)
    values[:16] = -2e-38
    values[0] = -0.0
    world.rows.q.fill_(1.0)
    world.plain[:, world.pages[0]] = torch.stack((keys, values)).view(2, -1, 16, 32)
    together = attend(team, world.rows, world.slab())
    alone = attend(team, world.rows.only(slice(1)), world.slab())
    assert torch.equal(bits(alone[0]), bits(together[0]))


def test_more_keys_than_the_table_has_pages_for_are_all(team: Team) -> None:
    """Drafts past a sequence's end ask for them; what lies behind a row of the table is not its own."""
    world = World(9, kv_heads=2, group=3, dim=64, block=16, runs=[3, 1, 4], longest=64)
    world.see([62, 63, 64, 64, 10, 62, 63, 64])
    expected = attend(team, world.rows, world.slab())
    beyond = torch.full((world.pages.numel() + 8,), world.plain.shape[1] - 1)
    rows = replace(world.rows, table=beyond[: world.pages.numel()].view(world.pages.shape))
    rows.table.copy_(world.pages)
    rows.kv_lens.copy_(torch.tensor([62, 63, 65, 200, 10, 62, 63, 81]))
    assert torch.equal(bits(attend(team, rows, world.slab())), bits(expected))


def test_no_key_counts_as_one(team: Team) -> None:
    world = World(5, kv_heads=2, group=2, dim=64, block=16, runs=[2, 3], longest=60)
    world.see([0] * 5)
    none = attend(team, world.rows, world.slab())
    world.see([1] * 5)
    assert torch.equal(bits(none), bits(attend(team, world.rows, world.slab())))
    assert none.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_query_shows_in_its_own_row_only(team: Team, bad: float) -> None:
    world = World(6, kv_heads=1, group=3, dim=64, block=16, runs=[4, 1], longest=150)
    clean = attend(team, world.rows, world.slab())
    world.rows.q[1, 70] = bad  # of its second head
    found = attend(team, world.rows, world.slab())
    assert found[1, 64:128].isnan().all()
    found[1, 64:128] = clean[1, 64:128]
    assert torch.equal(bits(found), bits(clean))


def test_a_bad_key_shows_in_those_who_see_it(team: Team) -> None:
    world = World(8, kv_heads=1, group=2, dim=64, block=16, runs=[3, 2], longest=200)
    world.see([30, 31, 200, 64, 65])
    clean = attend(team, world.rows, world.slab())
    world.plain[0, world.pages[0, 1], 14, 5] = torch.nan  # key 30
    found = attend(team, world.rows, world.slab())
    assert found[1:3].isnan().all()
    assert torch.equal(bits(found[[0, 3, 4]]), bits(clean[[0, 3, 4]]))


def test_scores_far_apart(team: Team) -> None:
    """The highest score may come in any tile, thousands above the others, or far below zero."""
    world = World(7, kv_heads=1, group=2, dim=64, block=16, runs=[4], longest=400)
    world.see([100, 200, 333, 400])
    world.rows.q.fill_(8.0)
    keys = world.plain[0, world.pages[0]].flatten(0, 1)
    for place in (3, 150, 390):
        keys[:] = world.randn(*keys.shape).to(BF16) - 4
        keys[place] = 4.0
        world.plain[0, world.pages[0]] = keys.view(-1, 16, 64)
        close(attend(team, world.rows, world.slab()), world.exact(), world)
