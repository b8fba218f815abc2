"""The DSpark drafter against a dense re-implementation, in fp64: chunks, every acceptance, leftovers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_dspark
import torch
from draft_rounds import Drafted, DraftRounds
from dspark_dense import DenseDSpark, DenseTarget
from tiny_dspark import BLOCK, Sizes

from xspec.draft.base import DraftMemory, Published
from xspec.draft.dspark import DSparkDrafter
from xspec.draft.heads import Block, ConfidenceHead, SelectedProbability
from xspec.kernels.base import ConfidenceParts, Kernels
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.reference import ReferenceKernels
from xspec.kv.layout import Planes
from xspec.models.base import Hidden
from xspec.models.loader import load_target
from xspec.nn.inputs import ForwardInputs, Segment

F64 = torch.float64
CPU = torch.device("cpu")
DRAFT_IDS = tuple(sorted(random.Random(5).sample(range(tiny.VOCAB_SIZE), 120)))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


class World:
    """A target, its drafter and the dense drafter that must agree."""

    def __init__(
        self,
        root: Path,
        sizes: Sizes | None = None,
        variant: str = "llama",
        kernels: Kernels | None = None,
        **options: Any,
    ) -> None:
        self.sizes = sizes or Sizes()
        self.kernels = kernels or CpuKernels()
        model = tiny.make_checkpoint(root / "target", variant, overrides=tiny_dspark.target_config())
        self.path = tiny_dspark.make_dspark(root / "draft", self.sizes, **options)
        self.target = load_target(model, self.kernels, dtype=F64, device=CPU)
        config = tiny.make_config(variant, tiny_dspark.target_config())
        self.dense_target = DenseTarget(config, tiny.make_weights(config))
        self.dense = DenseDSpark(
            tiny_dspark.flat_config(self.sizes),
            tiny_dspark.weights(self.sizes),
            self.dense_target,
            self.sizes.draft_ids,
        )

    def drafter(self, regime: str | None = "greedy", dtype: torch.dtype = F64) -> DSparkDrafter:
        return DSparkDrafter.load(
            self.path,
            target=self.target,
            kernels=self.kernels,
            dtype=dtype,
            device=CPU,
            steps=self.sizes.block,
            regime=regime,
        )

    def rounds(self, texts: list[list[int]], **options: Any) -> DraftRounds:
        return DraftRounds(self.target, self.drafter(), self.kernels, texts, **options)

    def check(self, rounds: DraftRounds, sequences: list[int], *, rank: int = 0, padding: int = 0) -> Drafted:
        width = self.sizes.block
        drafted = rounds.draft(
            sequences,
            width,
            padding=padding,
            pick=lambda logits: logits.argsort(1, descending=True)[:, rank],
        )
        for lane, sequence in enumerate(sequences):
            known = rounds.lengths[sequence]
            expected = self.dense.draft(rounds.texts[sequence][: known + 1], rank)
            assert drafted.draft.tokens[lane].tolist() == expected.tokens
            assert drafted.positions[:, lane].tolist() == list(range(known + 1, known + 1 + width))
            same(drafted.logits[:, lane], expected.logits, 1e-9)
            same(drafted.draft.signals[lane].double(), expected.signals, 1e-6)
        assert drafted.draft.tokens.dtype == torch.int64 and drafted.draft.signals.dtype == torch.float32
        return drafted


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def make_texts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(tiny.VOCAB_SIZE) for _ in range(tokens)] for _ in range(count)]


def context_kv(rounds: DraftRounds, sequence: int) -> torch.Tensor:
    """Draft K/V of all positions that are facts: [L, 2 * G, T, D]."""
    positions = torch.arange(rounds.lengths[sequence])
    pages = rounds.tables[sequence][positions // rounds.block_size]
    slots = pages * rounds.block_size + positions % rounds.block_size
    return torch.stack([slab.flatten(1, 2)[:, slots] for slab in rounds.pool.draft])


WORLDS: dict[str, tuple[Sizes, str]] = {
    "llama-vanilla-mask-embedding": (Sizes(), "llama"),
    "qwen3-gated-reduced-mask-token": (
        Sizes("qwen3", markov="gated", mask_embedding=False, draft_ids=DRAFT_IDS),
        "qwen3",
    ),
    "dflash-embedding-tap": (
        Sizes("qwen3", layer_ids=(-1, 1, 2), markov=None, confidence=False, mask_embedding=False, layers=1),
        "llama-tied",
    ),
    "no-confidence-reduced": (Sizes(confidence=False, draft_ids=DRAFT_IDS, layer_ids=(2,)), "llama"),
    "confidence-without-markov": (Sizes(markov="gated", with_markov=False, block=3), "qwen3"),
}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, *WORLDS[request.param])


def test_spec(tmp_path: Path) -> None:
    spec = World(tmp_path, Sizes(layer_ids=(-1, 0, 2))).drafter().spec
    assert (spec.name, spec.steps, spec.max_steps, spec.block) == ("dspark", (BLOCK,), BLOCK, BLOCK)
    assert spec.taps == (0, 1, 3)
    assert spec.planes == Planes(2, kv_heads=2, head_dim=12, page_state=0)


def test_equals_the_dense_drafter_after_chunks_and_rounds_of_every_size(world: World) -> None:
    """Pages of 4 tokens, so that every chunk, block and round crosses page edges somewhere."""
    width = world.sizes.block
    texts = make_texts(3, 60)
    rounds = world.rounds(texts)
    rounds.prefill([(0, 6), (1, 1)])
    rounds.prefill([(2, 3), (0, 5), (1, 2)])
    world.check(rounds, [0, 1, 2], padding=2)
    draw = random.Random(1)
    for count in range(1, width + 2):
        committed = [count, draw.randint(1, width + 1), draw.randint(1, width + 1)]
        rounds.verify([0, 1, 2], width + 1, committed, seed=count)
        world.check(rounds, [2, 0, 1], padding=count % 2)
    rounds.verify([0, 2], 1, [1, 1])
    drafted = world.check(rounds, [0, 1, 2])
    assert len(set(drafted.draft.tokens.flatten().tolist())) > width


def test_equals_the_dense_drafter_on_the_reference_kernels(tmp_path: Path) -> None:
    world = World(tmp_path, *WORLDS["qwen3-gated-reduced-mask-token"], kernels=ReferenceKernels())
    rounds = world.rounds(make_texts(2, 20, seed=3), block_size=3)
    rounds.prefill([(0, 5), (1, 2)])
    world.check(rounds, [0, 1], padding=1)
    rounds.verify([0, 1], BLOCK + 1, [2, BLOCK + 1])
    world.check(rounds, [1, 0])


def test_the_first_block_of_a_one_token_prompt_and_a_block_without_any_context(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds = world.rounds(make_texts(2, 12))
    world.check(rounds, [0])
    rounds.prefill([(1, 1)])
    world.check(rounds, [1, 0])


def test_what_is_picked_feeds_the_next_slot(world: World) -> None:
    """The third best of every slot: the Markov bias and the confidence must follow the pick, not the best."""
    rounds = world.rounds(make_texts(2, 30))
    rounds.prefill([(0, 9), (1, 4)])
    world.check(rounds, [0, 1], rank=2)


def test_pick_is_told_the_ids_of_the_columns(tmp_path: Path) -> None:
    for name, sizes in (("whole", Sizes()), ("reduced", Sizes(draft_ids=DRAFT_IDS))):
        world = World(tmp_path / name, sizes)
        rounds = world.rounds(make_texts(1, 20))
        rounds.prefill([(0, 4)])
        seen: list[torch.Tensor | None] = []
        picked = iter(range(BLOCK))

        def pick(logits: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
            seen.append(ids)  # noqa: B023 - used within the iteration
            return torch.tensor([next(picked)])  # noqa: B023

        context = rounds_context(rounds, pick)
        tokens = rounds.drafter.draft(context, BLOCK).tokens
        if sizes.draft_ids is None:
            assert seen == [None] * BLOCK and tokens.tolist() == [list(range(BLOCK))]
        else:
            assert all(ids is not None and ids.tolist() == list(DRAFT_IDS) for ids in seen)
            assert tokens.tolist() == [list(DRAFT_IDS[:BLOCK])]


def rounds_context(rounds: DraftRounds, pick: Any) -> Any:
    """The DraftContext that `rounds` would hand over for sequence 0, with a pick of one's own."""
    contexts = []

    class Spy:
        def draft(self, context: Any, steps: int) -> Any:
            contexts.append(context)
            raise StopIteration

    drafter, rounds.drafter = rounds.drafter, Spy()  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        rounds.draft([0], BLOCK)
    rounds.drafter = drafter
    (context,) = contexts
    return type(context)(context.rows, context.last_tokens, context.positions, context.inputs, pick)


def test_publishing_in_pieces_equals_publishing_at_once(world: World) -> None:
    texts = make_texts(2, 40)
    at_once, pieces = world.rounds(texts), world.rounds(texts, seed=9)
    at_once.prefill([(0, 21), (1, 21)])
    for count in (1, 2, 3, 4, 5, 6):
        pieces.prefill([(1, count), (0, count)])
    assert at_once.lengths == pieces.lengths
    for sequence in range(2):
        found = context_kv(pieces, sequence)
        same(found, context_kv(at_once, sequence), 1e-12)
        expected = world.dense.context(texts[sequence][:21])
        same(found, torch.stack([torch.cat(kv, 1).transpose(0, 1) for kv in expected]), 1e-10)


def test_a_plain_spell_leaves_the_context_that_speculation_leaves(world: World) -> None:
    texts = make_texts(2, 40)
    plain, spec = world.rounds(texts), world.rounds(texts)
    for rounds in (plain, spec):
        rounds.prefill([(0, 5), (1, 8)])
    width = world.sizes.block
    counts = (width + 1, 1, 3, 2)
    for count in counts:
        spec.draft([0, 1], width)
        spec.verify([0, 1], width + 1, [count, count], seed=count)
    for _ in range(sum(counts)):
        plain.verify([0, 1], 1, [1, 1])
    assert plain.lengths == spec.lengths
    for sequence in range(2):
        same(context_kv(spec, sequence), context_kv(plain, sequence), 1e-12)
    found, expected = world.check(spec, [0, 1]), world.check(plain, [0, 1])
    assert torch.equal(found.draft.tokens, expected.draft.tokens)
    same(found.logits, expected.logits, 1e-12)


def test_rejected_rows_and_padded_lanes_leave_no_trace(tmp_path: Path) -> None:
    """Their states are NaN when they are published: any trace would show."""
    world = World(tmp_path)
    texts = make_texts(3, 40)
    clean, dirty = world.rounds(texts), world.rounds(texts)
    for rounds in (clean, dirty):
        rounds.prefill([(0, 6), (1, 3), (2, 9)])
    for committed in ([1, 6, 2], [3, 1, 6], [6, 2, 4]):
        dirty.draft([0, 1, 2], BLOCK, padding=2)
        dirty.verify([0, 1, 2], BLOCK + 1, committed, padding=2, spoil=True)
        for sequence, count in enumerate(committed):
            for _ in range(count):
                clean.verify([sequence], 1, [1])
    for sequence in range(3):
        same(context_kv(dirty, sequence), context_kv(clean, sequence), 1e-12)
    world.check(dirty, [0, 1, 2])
    for slab in dirty.pool.draft:
        assert not torch.isfinite(slab[:, dirty.pool.sink_page]).all()  # where all of it went
        assert torch.isfinite(slab[:, : dirty.pool.sink_page]).all()
        assert not slab[:, 0].any()


def test_other_sequences_are_not_touched(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds = world.rounds(make_texts(3, 30))
    rounds.prefill([(0, 5), (1, 7), (2, 10)])
    before = [slab.clone() for slab in rounds.pool.draft]
    rounds.draft([1], BLOCK, padding=3)
    rounds.verify([1], BLOCK + 1, [2], padding=3, spoil=True)
    own = {*rounds.tables[1].tolist(), rounds.pool.sink_page}
    others = [page for page in range(rounds.pool.pages) if page not in own]
    changed = False
    for slab, old in zip(rounds.pool.draft, before, strict=True):
        assert torch.equal(slab[:, others], old[:, others])
        changed |= not torch.equal(slab, old)
    assert changed


def test_what_lies_past_the_facts_is_never_seen(world: World) -> None:
    """Leftovers of earlier blocks, of rejected rows and of whoever had the page before."""
    width = world.sizes.block
    rounds = world.rounds(make_texts(2, 40))
    rounds.prefill([(0, 6), (1, 9)])
    rounds.draft([0, 1], width)
    rounds.verify([0, 1], width + 1, [2, 1])
    expected = rounds.draft([0, 1], width)
    facts = {sequence: context_kv(rounds, sequence) for sequence in range(2)}
    for slab in rounds.pool.draft:
        slab.fill_(1e3)
    for sequence, kv in facts.items():
        positions = torch.arange(rounds.lengths[sequence])
        slots = rounds.tables[sequence][positions // 4] * 4 + positions % 4
        for slab, layer in zip(rounds.pool.draft, kv, strict=True):
            slab.flatten(1, 2)[:, slots] = layer
    found = rounds.draft([0, 1], width)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.draft.signals, expected.draft.signals)


def test_padding_of_the_flat_axis_is_no_fact(tmp_path: Path) -> None:
    """A ragged verify pass: lanes of 3, 1 and 2 rows, then padded rows that belong to no lane (-1)."""
    world = World(tmp_path)
    drafter = world.drafter()
    slabs = tuple(world.kernels.kv_slab(5, 4, 2, 12, F64) for _ in range(2))
    drafter.attach(DraftMemory(4, slabs, torch.zeros(5, 0, dtype=F64), 4, 4))
    taps = tuple(torch.randn(8, 64, dtype=F64) for _ in range(2))
    published = Published(
        tokens=torch.zeros(8, dtype=torch.int64),
        hidden=Hidden(taps[0], taps[0], taps),
        inputs=ForwardInputs(
            positions=torch.tensor([0, 1, 2, 0, 0, 1, 0, 0]),
            slots=torch.tensor([4, 5, 6, 8, 12, 13, 0, 0]),
            kv_lens=torch.ones(8, dtype=torch.int64),
            page_table=torch.tensor([[1], [2], [3]]),
            segments=(Segment(0, 1, 8, 1, 0),),
        ),
        rows=torch.tensor([1, 2, 3]),
        lanes=torch.tensor([0, 0, 0, 1, 2, 2, -1, -1]),
        first=torch.tensor([0, 3, 4]),
        committed=torch.tensor([2, 1, 2]),
    )
    drafter.publish(published)
    written = slabs[0].flatten(1, 2).abs().sum((0, 2)).nonzero().view(-1).tolist()
    assert written == [4, 5, 8, 12, 13, 16]  # the facts, and the sink


def test_taps_are_the_raw_outputs_of_the_named_layers(tmp_path: Path) -> None:
    """Every layer of the target, off by none: ids 0, 1, 2 and the embedding (-1), against dense layers."""
    world = World(tmp_path, Sizes(layer_ids=(-1, 0, 1, 2)))
    text = make_texts(1, 9)[0]
    seen: list[Published] = []
    rounds = world.rounds([text])
    publish = rounds.drafter.publish
    rounds.drafter.publish = seen.append  # type: ignore[method-assign]
    rounds.prefill([(0, 9)])
    outputs = world.dense_target.layer_outputs(text)
    assert len(seen[0].hidden.taps) == 4
    for tap, index in zip(seen[0].hidden.taps, (-1, 0, 1, 2), strict=True):
        same(tap, outputs[index], 1e-10)
    # One tap alone, passed through as it is, decides the keys: a wrong layer would show in every one.
    publish(seen[0])
    for index in (-1, 0, 1, 2):
        alone = World(tmp_path / str(index), Sizes(layer_ids=(index,)))
        other = alone.rounds([text])
        other.prefill([(0, 9)])
        keys, values = alone.dense.context(text)[1]
        same(context_kv(other, 0)[1], torch.cat((keys, values), 1).transpose(0, 1), 1e-10)


def test_a_prefix_cache_hit_brings_its_context_along(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = make_texts(2, 30)
    second[:12] = first[:12]
    rounds = world.rounds([first, second])
    rounds.prefill([(0, 14)])
    rounds.share(0, 1, pages=2)
    rounds.prefill([(1, 3)])
    world.check(rounds, [1, 0])


def test_a_block_at_the_end_of_its_pages_writes_to_the_sink(tmp_path: Path) -> None:
    """Positions past what the row may write: its own facts and everybody else's stay as they were."""
    world = World(tmp_path)
    rounds = world.rounds(make_texts(2, 12))
    rounds.prefill([(0, 10), (1, 6)])
    kv = context_kv(rounds, 0), context_kv(rounds, 1)
    drafted = rounds.draft([0], BLOCK)
    assert torch.isfinite(drafted.logits).all()
    assert torch.equal(kv[0], context_kv(rounds, 0)) and torch.equal(kv[1], context_kv(rounds, 1))


def test_calibration_of_each_regime(tmp_path: Path) -> None:
    temperatures, biases = [0.5, 1.0, 2.0, 4.0, 1.5], [0.0, -1.0, 0.5, 0.25, 2.0]
    table = {
        "greedy": {"temperatures": temperatures, "biases": biases, "samples": [9] * BLOCK},
        "sampled": {"temperatures": [3.0] * BLOCK, "biases": [0.0] * BLOCK},
    }
    world = World(tmp_path, changes={"confidence_calibration": table})
    rounds = world.rounds(make_texts(2, 20))
    rounds.prefill([(0, 6), (1, 3)])
    found = {}
    for regime in ("greedy", "sampled", None):
        rounds.drafter = world.drafter(regime)
        pool = rounds.pool
        rounds.drafter.attach(DraftMemory(3, pool.draft, pool.page_state, pool.sink_page, 4))
        found[regime] = rounds.draft([0, 1], BLOCK).draft.signals.double()
    raw = torch.logit(found[None])
    same(found[None][0], world.dense.draft(rounds.texts[0][:7]).signals, 1e-6)
    same(found["greedy"], torch.sigmoid(raw / torch.tensor(temperatures) + torch.tensor(biases)), 1e-5)
    same(found["sampled"], torch.sigmoid(raw / 3.0), 1e-5)


def test_every_row_has_the_confidence_of_its_own_regime() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 64)
    weight, bias = torch.randn(64) * 0.1, torch.tensor([0.5])
    temperatures, offsets = torch.tensor([[1.0, 2.0], [4.0, 0.5]]), torch.tensor([[0.0, 0.5], [-1.0, 0.25]])
    head = ConfidenceHead(ConfidenceParts(weight, bias, temperatures, offsets, False))
    mixed = head(Block(hidden, (), (), (), torch.tensor([True, False, True])))
    raw = (hidden @ weight + 0.5).T  # [R, B]
    same(mixed[1], torch.sigmoid(raw[1] / torch.tensor([1.0, 2.0]) + torch.tensor([0.0, 0.5])), 1e-6)
    same(mixed[2], torch.sigmoid(raw[2] / torch.tensor([4.0, 0.5]) + torch.tensor([-1.0, 0.25])), 1e-6)
    assert torch.equal(head(Block(hidden, (), (), ()))[1], mixed[1])


def test_confidence_is_computed_in_fp32_from_half_precision_states() -> None:
    torch.manual_seed(0)
    hidden, embedded = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 4, 8).bfloat16()
    weight, bias = torch.randn(72) * 0.1, torch.tensor([0.5])
    temperatures, offsets = torch.tensor([1.0, 2.0, 0.5]).repeat(2, 1), torch.tensor([[0.0, 1.0, -1.0]] * 2)
    block = Block(hidden, tuple(embedded), (), ())
    found = ConfidenceHead(ConfidenceParts(weight, bias, temperatures, offsets, True))(block)
    features = torch.cat((hidden, embedded), -1).double()
    logits = (features @ weight.double() + 0.5) / temperatures[0].double()[:, None]
    assert found.dtype == torch.float32 and found.shape == (4, 3)
    same(found.double(), torch.sigmoid(logits + offsets[0].double()[:, None]).T, 1e-6)
    alone = ConfidenceHead(ConfidenceParts(weight[:64], bias, temperatures, offsets, False))(block)
    same(alone[:, 0].double(), torch.sigmoid(hidden[0].double() @ weight[:64].double() + 0.5), 1e-6)
    # High ones do not all round to 1, as they would in bf16: ties, and products of ones.
    high = ConfidenceHead(ConfidenceParts(weight, bias + 8.0, temperatures[:, :1], offsets[:, :1], True))(
        block
    )
    assert (high < 1.0).all() and (high.bfloat16() == 1.0).all()


def test_selected_probability_is_computed_in_fp32() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(4, 300).bfloat16() * 3 for _ in range(2)]
    columns = [torch.tensor([0, 5, 7, 299]), torch.tensor([1, 1, 2, 3])]
    found = SelectedProbability()(Block(torch.empty(2, 4, 0), (), logits, columns))
    expected = [torch.softmax(x.double(), 1)[range(4), at] for x, at in zip(logits, columns, strict=True)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack(expected, 1), rtol=1e-5, atol=0)


def test_a_drafter_in_half_precision(tmp_path: Path) -> None:
    """bf16 drafts agree with fp64 ones nearly everywhere, and confidences keep their resolution."""
    world = World(tmp_path)
    kernels, dtype = CpuKernels(), torch.bfloat16
    target = load_target(tmp_path / "target", kernels, dtype=dtype, device=CPU)
    drafter = DSparkDrafter.load(
        world.path, target=target, kernels=kernels, dtype=dtype, device=CPU, steps=BLOCK
    )
    texts = make_texts(8, 20)
    half, whole = DraftRounds(target, drafter, kernels, texts, dtype=dtype), world.rounds(texts)
    sequences = list(range(8))
    for rounds in (half, whole):
        rounds.prefill([(sequence, 3 + sequence) for sequence in sequences])
    found, expected = half.draft(sequences, BLOCK).draft, whole.draft(sequences, BLOCK).draft
    assert found.signals.dtype == torch.float32
    first = found.tokens[:, 0] == expected.tokens[:, 0]
    assert first.sum() >= 7
    same(found.signals[first, 0], expected.signals[first, 0], 0.05)


def test_the_wrong_step_count_and_an_unattached_drafter_raise(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds = world.rounds(make_texts(1, 20))
    rounds.prefill([(0, 4)])
    with pytest.raises(ValueError, match="a block of 5 is never drafted as 3"):
        rounds.draft([0], 3)
    rounds.drafter = world.drafter()
    with pytest.raises(RuntimeError, match="before attach"):
        rounds.draft([0], BLOCK)
    with pytest.raises(RuntimeError, match="2 draft layers were given 1 slabs"):
        pool = rounds.pool
        rounds.drafter.attach(DraftMemory(2, pool.draft[:1], pool.page_state, pool.sink_page, 4))
