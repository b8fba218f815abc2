"""The MTP drafter against a dense one, in fp64: batches, chunks, every acceptance, prefix-cache hits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafters
import torch
from draft_rounds import Drafted, DraftRounds
from mtp_dense import DenseMtp

from xspec.draft.base import Drafter
from xspec.draft.make import load_drafter
from xspec.draft.mtp import MtpDrafter
from xspec.errors import ConfigError
from xspec.kernels.base import Kernels
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.reference import ReferenceKernels
from xspec.kv.layout import KVLayout, Planes
from xspec.kv.pool import KVPool
from xspec.models.blocks import Decoder
from xspec.models.loader import load_target
from xspec.nn.inputs import ForwardInputs, Segment

F64 = torch.float64
CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


class World:
    """A target, its drafter, the dense drafter that must agree, and texts with the target's dense states."""

    def __init__(
        self,
        root: Path,
        variant: str = "llama",
        kernels: Kernels | None = None,
        *,
        draft_ids: torch.Tensor | None = None,
        **keys: Any,
    ) -> None:
        self.kernels = kernels or CpuKernels()
        self.model = tiny.make_checkpoint(root / "target", variant)
        self.path = tiny_drafters.make_mtp(root / "draft", variant, draft_ids=draft_ids, **keys)
        self.target = load_target(self.model, self.kernels, dtype=F64, device=CPU)
        config = tiny_drafters.mtp_config(variant, **keys)
        weights = tiny.make_weights(tiny.make_config(variant))
        embedding = weights["model.embed_tokens.weight"]
        head = weights.get("lm_head.weight", embedding)
        self.dense = DenseMtp(
            config,
            tiny_drafters.mtp_weights(variant),
            embedding,
            head if draft_ids is None else head[draft_ids],
            draft_ids,
        )
        self.target_normed = config.get("target_hidden", "normed") == "normed"

    def drafter(self, path: Path | None = None, steps: int = STEPS) -> Drafter:
        return load_drafter(
            "MTP",
            path or self.path,
            model=self.model,
            target=self.target,
            kernels=self.kernels,
            dtype=F64,
            device=CPU,
            steps=steps,
        )

    def rounds(self, texts: list[list[int]], **options: Any) -> DraftRounds:
        return DraftRounds(self.target, self.drafter(), self.kernels, texts, **options)

    def states(self, text: list[int]) -> torch.Tensor:
        """What feeds the drafter, of every position of a text: one pass over one page."""
        kernels = ReferenceKernels()
        target = load_target(self.model, kernels, dtype=F64, device=CPU)
        pool = KVPool(KVLayout(target.spec.planes, len(text), F64), 3, kernels, CPU)
        positions = torch.arange(len(text))
        inputs = ForwardInputs(
            positions,
            positions + len(text),
            positions + 1,
            torch.ones(1, 1, dtype=torch.int64),
            (Segment(0, 1, len(text), 1, 0),),
        )
        hidden = target.forward(torch.tensor(text), inputs, pool.target)
        return hidden.last if self.target_normed else hidden.residual

    def check(
        self,
        rounds: DraftRounds,
        sequences: list[int],
        steps: int,
        states: dict[int, torch.Tensor],
        **options: Any,
    ) -> Drafted:
        drafted = rounds.draft(sequences, steps, **options)
        for lane, sequence in enumerate(sequences):
            known = rounds.lengths[sequence]
            expected = self.dense.draft(rounds.texts[sequence][: known + 1], states[sequence][:known], steps)
            assert drafted.draft.tokens[lane].tolist() == expected.tokens
            assert drafted.positions[:, lane].tolist() == list(range(known + 1, known + 1 + steps))
            same(drafted.logits[:, lane], expected.logits, 1e-10)
            same(drafted.draft.signals[lane].double(), expected.signals, 1e-6)
        assert drafted.draft.tokens.dtype == torch.int64 and drafted.draft.signals.dtype == torch.float32
        return drafted


def same(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def text(length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCAB_SIZE, (length,), generator=draw).tolist()


def states_of(world: World, texts: list[list[int]]) -> dict[int, torch.Tensor]:
    return {sequence: world.states(text) for sequence, text in enumerate(texts)}


# -- against the dense drafter -----------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "llama-bias", "llama3"])
def test_drafts_of_a_batch_after_one_prefill(variant: str, kernels: type[Kernels], tmp_path: Path) -> None:
    if variant == "llama3":  # the dense drafter knows plain rotation only
        world = World(tmp_path, variant, kernels(), rope_scaling=None, rope_theta=5000.0)
    else:
        world = World(tmp_path, variant, kernels())
    texts = [text(length, seed) for seed, length in enumerate((3, 13, 9, 8))]
    rounds = world.rounds(texts)
    rounds.prefill([(0, 1), (1, 11), (2, 8), (3, 7)])  # 1: the shortest context there is, one pair
    world.check(rounds, [2, 0, 3, 1], STEPS, states_of(world, texts), padding=3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16])
def test_chunks_of_a_prompt_change_nothing(chunk: int, tmp_path: Path) -> None:
    world = World(tmp_path)
    texts = [text(18, 1), text(18, 2)]
    rounds = world.rounds(texts)
    states = states_of(world, texts)
    while min(rounds.lengths) < 17:
        rounds.prefill([(s, min(chunk, 17 - rounds.lengths[s])) for s in (0, 1) if rounds.lengths[s] < 17])
        world.check(rounds, [0, 1], 2, states)


@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
@pytest.mark.parametrize("committed", [1, 2, STEPS, STEPS + 1])
def test_drafts_after_every_acceptance(committed: int, block_size: int, tmp_path: Path) -> None:
    """1: nothing accepted; STEPS + 1: all of it, where the last draft's row was never written by drafting."""
    world = World(tmp_path)
    texts = [text(40, 3), text(40, 4)]
    rounds = world.rounds(texts, block_size=block_size)
    states = states_of(world, texts)
    rounds.prefill([(0, 6), (1, 3)])
    for number in range(5):
        world.check(rounds, [0, 1], STEPS, states, padding=number % 2)
        rounds.verify([0, 1], STEPS + 1, [committed] * 2, padding=number % 2, seed=number)
    world.check(rounds, [0, 1], STEPS, states)


@pytest.mark.parametrize("seed", range(4))
def test_random_rounds(seed: int, tmp_path: Path) -> None:
    """K changes every round (0 included), sequences differ in acceptance, sit out, prefill beside others."""
    draw = random.Random(seed)
    world = World(tmp_path, draw.choice(["llama", "qwen3"]))
    texts = [text(40, 100 * seed + s) for s in range(4)]
    rounds = world.rounds(texts, block_size=draw.choice([2, 4, 5]), seed=seed)
    states = states_of(world, texts)
    for number in range(10):
        ready = [s for s in range(4) if 0 < rounds.lengths[s] < 39 - STEPS]
        starting = [s for s in range(4) if rounds.lengths[s] < 6 and draw.random() < 0.6]
        if starting:
            rounds.prefill([(s, draw.randint(1, 5)) for s in starting])
        playing = draw.sample(ready, draw.randint(1, len(ready))) if ready else []
        if not playing:
            continue
        steps = draw.randint(0, STEPS)
        if steps:
            world.check(rounds, playing, steps, states, padding=draw.randint(0, 2))
        committed = [draw.randint(1, steps + 1) for _ in playing]
        rounds.verify(playing, steps + 1, committed, padding=draw.randint(0, 2), seed=number)
    world.check(rounds, [s for s in range(4) if 0 < rounds.lengths[s] < 40], 1, states)


def test_seven_one_none_seven_over_a_page_boundary(tmp_path: Path) -> None:
    world = World(tmp_path)
    drafter = world.drafter(steps=7)
    texts = [text(40, 9)]
    rounds = DraftRounds(world.target, drafter, world.kernels, texts, block_size=8)
    states = states_of(world, texts)
    rounds.prefill([(0, 5)])
    for steps, committed in ((7, 8), (1, 1), (0, 1), (7, 1), (7, 8), (0, 1), (7, 3)):
        if steps:
            world.check(rounds, [0], steps, states)
        rounds.verify([0], steps + 1, [committed])
    assert rounds.lengths == [28]
    world.check(rounds, [0], 7, states)


def test_the_limit_of_the_pages_cuts_nothing_that_counts(tmp_path: Path) -> None:
    """Two positions are left: the third and fourth steps write to the sink, the first two are right."""
    world = World(tmp_path)
    texts = [text(12, 5), text(12, 6)]
    rounds = world.rounds(texts)  # three pages of four each
    states = states_of(world, texts)
    rounds.prefill([(0, 10), (1, 10)])
    other = rounds.planes(1)
    drafted = rounds.draft([0], STEPS)
    expected = world.dense.draft(texts[0][:11], states[0][:10], 2)
    assert drafted.draft.tokens[0, :2].tolist() == expected.tokens
    same(drafted.logits[:2, 0], expected.logits, 1e-10)
    assert torch.equal(rounds.planes(1), other)
    assert drafted.logits.isfinite().all()


# -- the context is a function of the committed tokens alone -------------------------------------------


def test_plain_and_speculative_rounds_leave_the_same_context(tmp_path: Path) -> None:
    world = World(tmp_path)
    texts = [text(30, 11), text(30, 12)]
    plain, speculative = world.rounds(texts), world.rounds(texts, seed=5)
    for rounds in (plain, speculative):
        rounds.prefill([(0, 7), (1, 7)])
    for committed in (1, STEPS + 1, 3, STEPS + 1, 2):
        speculative.draft([0, 1], STEPS)
        speculative.verify([0, 1], STEPS + 1, [committed] * 2)
        for _ in range(committed):
            plain.verify([0, 1], 1, [1, 1])
        for sequence in (0, 1):
            same(speculative.planes(sequence), plain.planes(sequence))
            same(speculative.page_states(sequence), plain.page_states(sequence))
        found, expected = (rounds.draft([0, 1], STEPS) for rounds in (speculative, plain))
        assert torch.equal(found.draft.tokens, expected.draft.tokens)
        same(found.logits, expected.logits)


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
def test_rejected_rows_and_padded_lanes_leave_no_trace(kernels: type[Kernels], tmp_path: Path) -> None:
    """Not even when their states are NaN."""
    world = World(tmp_path, kernels=kernels())
    texts = [text(24, 21), text(24, 22), text(24, 23)]
    clean, dirty = world.rounds(texts), world.rounds(texts)
    for rounds in (clean, dirty):
        rounds.prefill([(0, 5), (1, 6), (2, 7)])
    bystander = dirty.planes(2)
    for number, committed in enumerate(([1, 4], [3, 2], [5, 1])):
        clean.verify([0, 1], STEPS + 1, committed, seed=number)
        dirty.verify([0, 1], STEPS + 1, committed, seed=50 + number, padding=2, spoil=True)
        found, expected = dirty.draft([0, 1], 3, padding=1), clean.draft([0, 1], 3)
        same(found.logits, expected.logits)
        assert torch.equal(found.draft.tokens, expected.draft.tokens)
    for sequence in range(3):
        same(dirty.planes(sequence), clean.planes(sequence))
        same(dirty.page_states(sequence), clean.page_states(sequence))
    assert torch.equal(dirty.planes(2), bystander)
    same(dirty.draft([2], STEPS).logits, clean.draft([2], STEPS).logits)


def test_a_sequence_that_commits_nothing_stays_where_it_was(tmp_path: Path) -> None:
    world = World(tmp_path)
    texts = [text(20, 26), text(20, 27)]
    rounds = world.rounds(texts)
    states = states_of(world, texts)
    rounds.prefill([(0, 6), (1, 7)])
    rounds.verify([0, 1], STEPS + 1, [0, 2], spoil=True)
    assert rounds.lengths == [6, 9]
    world.check(rounds, [0, 1], STEPS, states)


def test_only_facts_and_the_sink_are_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds = world.rounds([text(24, 31), text(24, 32)])
    for memory in (*rounds.pool.draft, rounds.pool.page_state):
        memory.fill_(123.0)
    rounds.prefill([(0, 9), (1, 3)])
    rounds.verify([0, 1], STEPS + 1, [2, 1], padding=2)
    (slab,) = rounds.pool.draft
    written = (slab != 123.0).any(-1).any(0).flatten()  # [slots]
    expected = torch.zeros_like(written)
    for sequence, facts in ((0, 11), (1, 4)):
        for position in range(1, facts):  # position 0 has no pair
            expected[rounds.tables[sequence, position // 4] * 4 + position % 4] = True
    sink = rounds.pool.sink_page
    assert torch.equal(written[: sink * 4], expected[: sink * 4])
    full = {int(rounds.tables[0, 0]), int(rounds.tables[0, 1]), int(rounds.tables[1, 0])}
    changed = (rounds.pool.page_state != 123.0).any(1).nonzero().view(-1).tolist()
    assert set(changed) == full | {sink}


@pytest.mark.parametrize("pages", [1, 3])
def test_a_prefix_cache_hit_restores_the_boundary(pages: int, tmp_path: Path) -> None:
    """Pages of a prefill or of accepted drafts: who starts behind them drafts as if it had run them."""
    world = World(tmp_path)
    shared = text(12, 41)
    texts = [shared + text(10, 42), shared[: 4 * pages] + text(10, 43)]
    rounds = world.rounds(texts)
    states = states_of(world, texts)
    rounds.prefill([(0, 6)])
    rounds.draft([0], STEPS)
    rounds.verify([0], STEPS + 1, [STEPS + 1])
    rounds.verify([0], STEPS + 1, [3])
    rounds.prefill([(1, 3)])  # an earlier tenant of the row leaves its boundary there
    rounds.share(0, 1, pages)
    world.check(rounds, [1], STEPS, states)  # drafting at once, behind the very last cached token
    rounds.verify([1], 1, [1])
    world.check(rounds, [1, 0], STEPS, states)


def test_a_new_tenant_starts_without_the_old_boundary(tmp_path: Path) -> None:
    """The old one had failed: its states were NaN. Once its pages are scrubbed, nothing is left of them."""
    world = World(tmp_path)
    rounds = world.rounds([text(10, 51), text(10, 52)])
    rounds.prefill([(0, 6)])
    rounds.verify([0], 2, [1], fail=True)
    assert rounds.draft([0], 1).logits.isnan().all()
    for slab in rounds.pool.draft:
        world.kernels.zero_pages(slab, rounds.tables[0])
    rounds.lengths[0], rounds.texts[0] = 0, rounds.texts[1]
    rounds.drafter.bind(1, None)
    rounds.prefill([(0, 6)])
    assert all(slab.isfinite().all() for slab in rounds.pool.draft)  # the sink too
    rounds.prefill([(1, 6)])
    found = rounds.draft([0, 1], STEPS)
    same(found.logits[:, 0], found.logits[:, 1])


# -- config keys, reduced vocabulary, picks ---------------------------------------------------------------


def test_which_states_feed_it_is_the_configs_choice(tmp_path: Path) -> None:
    """All four combinations agree with the dense drafter, and each key shows where it must."""
    texts = [text(12, 61)]
    logits = {}
    for target in ("normed", "residual"):
        for step in ("normed", "residual"):
            keys = {"target_hidden": target, "step_hidden": step}
            world = World(tmp_path / f"{target}-{step}", **keys)
            rounds = world.rounds(texts)
            rounds.prefill([(0, 9)])
            logits[target, step] = world.check(rounds, [0], 3, states_of(world, texts)).logits[:, 0]
    for target in ("normed", "residual"):  # the first step knows no earlier one
        same(logits[target, "normed"][0], logits[target, "residual"][0])
        assert (logits[target, "normed"][1] - logits[target, "residual"][1]).abs().max() > 1e-3
    for step in ("normed", "residual"):
        assert (logits["normed", step][0] - logits["residual", step][0]).abs().max() > 1e-3


def test_the_defaults_are_those_of_deepseek(tmp_path: Path) -> None:
    texts = [text(12, 61)]
    found = []
    for name, keys in (("silent", {}), ("said", {"target_hidden": "normed", "step_hidden": "residual"})):
        rounds = World(tmp_path / name, **keys).rounds(texts)
        rounds.prefill([(0, 9)])
        found.append(rounds.draft([0], 3).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_a_reduced_vocabulary_drafts_target_ids(variant: str, kernels: type[Kernels], tmp_path: Path) -> None:
    ids = torch.arange(3, tiny.VOCAB_SIZE, 5)
    world = World(tmp_path, variant, kernels(), draft_ids=ids)
    texts = [text(14, 71), text(14, 72)]
    rounds = world.rounds(texts)
    states = states_of(world, texts)
    rounds.prefill([(0, 8), (1, 5)])
    drafted = world.check(rounds, [0, 1], STEPS, states)
    assert drafted.logits.shape == (STEPS, 2, len(ids))
    assert set(drafted.draft.tokens.flatten().tolist()) <= set(ids.tolist())
    rounds.verify([0, 1], STEPS + 1, [2, 5])
    world.check(rounds, [0, 1], STEPS, states)


def test_whatever_is_picked_is_what_goes_on(tmp_path: Path) -> None:
    """A pick other than the best: its token feeds the next step, its probability is the signal."""
    ids = torch.arange(1, tiny.VOCAB_SIZE, 3)
    world = World(tmp_path, draft_ids=ids)
    texts = [text(10, 81)]
    rounds = world.rounds(texts)
    rounds.prefill([(0, 8)])
    drafted = rounds.draft([0], STEPS, pick=lambda logits: logits.topk(3).indices[:, 2])
    expected = world.dense.draft(texts[0][:9], world.states(texts[0])[:8], STEPS, rank=2)
    assert drafted.draft.tokens[0].tolist() == expected.tokens
    same(drafted.logits[:, 0], expected.logits, 1e-10)
    same(drafted.draft.signals[0].double(), expected.signals, 1e-6)


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    """In the compute dtype of a real target: finite drafts, context as after one prefill but for rounding."""
    world = World(tmp_path)
    target = load_target(world.model, world.kernels, dtype=torch.bfloat16, device=CPU)
    drafts = []
    for chunks in ([6], [1, 2, 3]):
        drafter = MtpDrafter.load(
            world.path,
            model=world.model,
            target=target,
            kernels=world.kernels,
            dtype=torch.bfloat16,
            device=CPU,
            steps=STEPS,
        )
        rounds = DraftRounds(target, drafter, world.kernels, [text(12, 91)], dtype=torch.bfloat16)
        for chunk in chunks:
            rounds.prefill([(0, chunk)])
        drafts.append(rounds.draft([0], 1))
        assert rounds.planes(0).dtype == drafts[-1].logits.dtype == torch.bfloat16
    torch.testing.assert_close(drafts[0].logits, drafts[1].logits, rtol=0.05, atol=0.3)


# -- the spec -----------------------------------------------------------------------------------------------


def test_what_it_asks_for(tmp_path: Path) -> None:
    world = World(tmp_path, "qwen3")
    spec = world.drafter(steps=3).spec
    assert (spec.name, spec.steps, spec.max_steps, spec.taps, spec.block) == ("mtp", (1, 2, 3), 3, (), 0)
    assert spec.planes == Planes(1, kv_heads=2, head_dim=32, page_state=64)


@pytest.mark.parametrize("steps", [0, 17, -1])
def test_steps_out_of_range(steps: int, tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=rf"--num_speculative_tokens={steps}: .*from 1 to 16"):
        world.drafter(steps=steps)


def test_unknown_algorithm(tmp_path: Path) -> None:
    world = World(tmp_path)
    load = partial(
        load_drafter,
        model=world.model,
        target=world.target,
        kernels=world.kernels,
        dtype=F64,
        device=CPU,
        steps=1,
    )
    with pytest.raises(ConfigError, match="--speculative_algorithm=Eagle3: allowed: MTP, DSpark"):
        load("Eagle3", world.path)
    with pytest.raises(ConfigError, match="--speculative_algorithm=DSpark needs --draft_model=DIR"):
        load("DSpark", None)
    assert isinstance(load("mtp", world.path), MtpDrafter)


def test_it_must_be_attached(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before attach"):
        World(tmp_path).drafter().bind(1, None)


def test_a_target_it_did_not_come_with_keeps_its_own_head(tmp_path: Path) -> None:
    """Loading and drafting leave the target's logits alone (a shared head must not be overwritten)."""
    world = World(tmp_path, "llama-tied", draft_ids=torch.arange(0, tiny.VOCAB_SIZE, 2))
    assert isinstance(world.target, Decoder)
    probe = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=F64)
    before = world.target.logits(probe)
    rounds = world.rounds([text(10, 95)])
    rounds.prefill([(0, 5)])
    rounds.draft([0], STEPS)
    assert torch.equal(world.target.logits(probe), before)
