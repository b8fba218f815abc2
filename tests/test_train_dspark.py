"""The DSpark trainer: blocks, what they see, training equal to serving, loss, learning, export, resuming."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from xspec.draft.dspark_config import open_dspark
from xspec.errors import CheckpointError, ConfigError
from xspec.models.base import TargetSpec
from xspec.train.dataset import Captured, DatasetSpec, Reader, Writer, pack
from xspec.train.dspark import (
    DSparkOptions,
    DSparkTrainer,
    block_hidden,
    choose_taps,
    model_sizes,
    train_dspark,
)
from xspec.train.dspark_blocks import candidate_anchors, draw_anchors, make_blocks, visible
from xspec.train.dspark_eval import Tally, draft_everywhere, jump
from xspec.train.dspark_model import DSparkModel
from xspec.train.layers import DecoderLayer, LayerSizes, RMSNorm, TargetWeights, initialise, rotate
from xspec.train.loop import LoopOptions, Progress, generator
from xspec.train.loss import DraftHead, draft_head

H, V, B = 64, 64, 3
SIZES = LayerSizes(hidden=H, heads=4, kv_heads=2, head_dim=16, inner=96, norm_eps=1e-5, rope_theta=1e4)
TARGET_LAYERS = 3
TAPS = (1, 2)
CPU = torch.device("cpu")


class ToyTarget:
    """A random llama-shaped model of three layers; its greedy text wanders before it repeats itself."""

    def __init__(self, seed: int = 3) -> None:
        source = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(DecoderLayer(SIZES) for _ in range(TARGET_LAYERS))
        initialise(self.layers, source, std=0.15)
        self.norm = RMSNorm(H, SIZES.norm_eps)
        self.embedding = torch.randn(V, H, generator=source)
        self.head = torch.randn(V, H, generator=source) * 0.5

    @property
    def weights(self) -> TargetWeights:
        return TargetWeights(self.embedding, self.head, self.norm.weight.detach(), SIZES, 256)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Normed hidden [T, H], and the stream after each layer."""
        residual, streams = self.embedding[tokens], []
        positions = torch.arange(len(tokens))
        for layer in self.layers:
            x = layer.input_layernorm(residual)
            keys, values = layer.self_attn.keys_values(x, positions)
            mask = positions[:, None] >= positions
            mixed = layer.self_attn.mix(layer.self_attn.queries(x, positions), keys, values, mask)
            residual = layer.finish(residual, mixed)
            streams.append(residual)
        return self.norm(residual), streams

    def answer(self, prompt: Sequence[int], count: int, source: torch.Generator | None = None) -> Captured:
        """Greedy, or drawn from the distribution with `source`."""
        tokens = torch.tensor(prompt)
        for _ in range(count):
            logits = self.states(tokens)[0][-1] @ self.head.T
            drawn = logits.argmax() if source is None else logits.softmax(-1).multinomial(1, generator=source)
            tokens = torch.cat((tokens, drawn.view(1)))
        hidden, streams = self.states(tokens)
        taps = torch.stack([streams[tap - 1] for tap in TAPS], 1)
        log_z = (hidden.bfloat16().float() @ self.head.T).logsumexp(-1)
        return Captured(
            tokens.int(), hidden.bfloat16(), taps.bfloat16(), log_z, len(prompt), sampled=source is not None
        )


@pytest.fixture(scope="module")
def target() -> ToyTarget:
    return ToyTarget()


def options(steps: int = 4, **changes: object) -> DSparkOptions:
    loop = LoopOptions(
        steps, seed=7, sequences_per_step=4, warmup_steps=10, bf16=False, evaluate_every=1000, save_every=1000
    )
    values: dict[str, object] = {"draft_vocab_size": V, "block_size": B, "markov_rank": 8, "anchors": 12}
    return DSparkOptions(loop, TARGET_LAYERS, **{**values, **changes})  # type: ignore[arg-type]


def make_trainer(target: ToyTarget, ids: torch.Tensor | None = None, **changes: object) -> DSparkTrainer:
    ids = torch.arange(V) if ids is None else ids
    chosen = options(draft_vocab_size=len(ids), **changes)
    model = DSparkModel(model_sizes(SIZES, chosen, V, len(TAPS)), generator(5, 0), target.weights.norm)
    shake(model)
    return DSparkTrainer(model, draft_head(target.head, ids), target.embedding, (0, 1), chosen)


def shake(model: DSparkModel) -> None:
    """Off the zeros it starts with, so that every part matters."""
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.05)
        model.markov_head.markov_w2.weight.mul_(100.0)  # the token before decides as much as the slot


@pytest.fixture(scope="module")
def sequences(target: ToyTarget) -> list[Captured]:
    source = torch.Generator().manual_seed(1)
    greedy = [target.answer([5, 9, 2], 20), target.answer([1], 13)]
    return [*greedy, target.answer([8, 8, 30, 4], 17, source)]


# Anchors and masks


def test_anchors_are_answer_tokens_with_a_successor() -> None:
    assert list(candidate_anchors(length=9, prompt_len=4)) == [4, 5, 6, 7]
    assert list(candidate_anchors(5, 4)) == [] and list(candidate_anchors(4, 4)) == []
    drawn = draw_anchors(9, 4, 32, generator(0, 0))
    assert drawn.tolist() == [4, 5, 6, 7]
    counts = torch.zeros(40)
    for step in range(300):
        some = draw_anchors(40, 10, 8, generator(0, step))
        assert len(some) == 8 and some.diff().min() > 0
        counts[some] += 1
    assert counts[:10].sum() == 0 and counts[39] == 0
    assert counts[10:39].min() > 40 and counts[10:39].max() < 130  # 83 each on average
    assert torch.equal(draw_anchors(40, 10, 8, generator(0, 3)), draw_anchors(40, 10, 8, generator(0, 3)))


def test_blocks_never_leave_their_sequence() -> None:
    tokens = torch.arange(100, 112)  # two sequences of 7 and 5
    blocks = make_blocks(tokens, [(0, 7), (7, 12)], [torch.tensor([2, 5]), torch.tensor([3])], 3)
    assert blocks.positions.tolist() == [2, 3, 4, 5, 6, 7, 3, 4, 5]
    assert blocks.rows.tolist() == [2, 3, 4, 5, 6, 6, 10, 11, 11]
    assert blocks.previous.tolist() == [102, 103, 104, 105, 106, 106, 110, 111, 111]
    assert blocks.labels.tolist() == [103, 104, 105, 106, 0, 0, 111, 0, 0]
    assert blocks.supervised.tolist() == [True] * 4 + [False] * 2 + [True] + [False] * 2
    assert blocks.slots.tolist() == [0, 1, 2] * 3
    assert [(lane.block_first, lane.block_last) for lane in blocks.lanes] == [(0, 6), (6, 9)]
    for anchor in (4, -1):
        with pytest.raises(ValueError, match="anchors"):
            make_blocks(tokens, [(7, 12)], [torch.tensor([anchor])], 3)


def test_a_block_row_sees_context_before_its_anchor_and_its_own_block() -> None:
    mask = visible(torch.tensor([1, 3]), 2, 4).int().tolist()
    assert mask == [
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_a_block_depends_on_nothing_else(target: ToyTarget, sequences: list[Captured]) -> None:
    trainer = make_trainer(target)
    batch = pack(sequences, generator(0, 0), CPU)
    anchors = [torch.tensor([5, 9, 14]), torch.tensor([4]), torch.tensor([6, 7])]
    blocks = make_blocks(batch.tokens, batch.spans, anchors, B)
    inputs = trainer.module.block_inputs(target.embedding[blocks.previous.view(-1, B)[:, 0]])
    positions = torch.cat([torch.arange(last - first) for first, last in batch.spans])

    @torch.no_grad()
    def run(taps: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        context = trainer.module.context_keys_values(trainer.module.context(taps), positions)
        return trainer.module.hidden(inputs, context, blocks)

    taps = batch.taps.float()
    base = run(taps, inputs)
    one = slice(B, 2 * B)  # the block at position 9 of the first sequence
    noise = torch.randn(taps.shape, generator=torch.Generator().manual_seed(0))
    later = taps.clone()
    later[9:] += noise[9:]  # all of its sequence from the anchor on, and the other sequences
    elsewhere = inputs.clone()
    elsewhere[: one.start] += 1.0
    elsewhere[one.stop :] -= 1.0
    assert torch.equal(run(later, elsewhere)[one], base[one])
    before = taps.clone()
    before[8] += noise[8]
    assert (run(before, inputs)[one] - base[one]).abs().max() > 1e-3
    assert torch.equal(run(before, inputs)[3 * B :], base[3 * B :])  # the other sequences
    own = inputs.clone()
    own[one.start] += 1.0
    changed = (run(taps, own) - base).abs().amax(-1) > 1e-4
    assert changed.nonzero().flatten().tolist() == [B, B + 1, B + 2]  # every slot: it sees both ways


@torch.no_grad()
def serve(model: DSparkModel, embedding: torch.Tensor, sequence: Captured, anchor: int) -> torch.Tensor:
    """One block as serving computes it: a context row at a time into a cache, then heads one by one."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in layers]

    def key_value(layer: DecoderLayer, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        key = (attention.k_proj.weight @ x).view(1, SIZES.kv_heads, SIZES.head_dim)
        value = (attention.v_proj.weight @ x).view(SIZES.kv_heads, SIZES.head_dim)
        return rotate(key, torch.tensor([position]), SIZES.rope_theta)[0], value

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + SIZES.norm_eps).sqrt() * weight

    for position in range(anchor):
        taps = torch.cat([tap.float() for tap in sequence.taps[position]])
        c = norm(model.fc.weight @ taps, model.hidden_norm.weight)
        for layer, cache in zip(layers, caches, strict=True):
            cache.append(key_value(layer, c, position))
    width = model.sizes.block
    streams = [embedding[int(sequence.tokens[anchor])], *[model.mask_embedding] * (width - 1)]
    for layer, cache in zip(layers, caches, strict=True):
        normed = [norm(x, layer.input_layernorm.weight) for x in streams]
        seen = cache + [key_value(layer, x, anchor + slot) for slot, x in enumerate(normed)]
        for slot, x in enumerate(normed):
            q = (layer.self_attn.q_proj.weight @ x).view(1, SIZES.heads, SIZES.head_dim)
            q = rotate(q, torch.tensor([anchor + slot]), SIZES.rope_theta)[0]
            mixed = []
            for head in range(SIZES.heads):
                group = head // (SIZES.heads // SIZES.kv_heads)
                scores = torch.stack([q[head] @ key[group] for key, _ in seen]) / SIZES.head_dim**0.5
                mixed.append(scores.softmax(0) @ torch.stack([value[group] for _, value in seen]))
            stream = streams[slot] + layer.self_attn.o_proj.weight @ torch.cat(mixed)
            y = norm(stream, layer.post_attention_layernorm.weight)
            mlp = layer.mlp
            inner = F.silu(mlp.gate_proj.weight @ y) * (mlp.up_proj.weight @ y)
            streams[slot] = stream + mlp.down_proj.weight @ inner
    return torch.stack([norm(x, model.norm.weight) for x in streams])


@pytest.mark.parametrize("markov_head", ["vanilla", "gated"])
def test_training_equals_serving(target: ToyTarget, sequences: list[Captured], markov_head: str) -> None:
    ids = torch.arange(V)[torch.arange(V) % 4 != 1]
    trainer = make_trainer(target, ids, markov_head=markov_head)
    model = trainer.module
    batch = pack(sequences, generator(0, 0), CPU)
    anchors = [torch.tensor([3, 8, 20]), torch.tensor([1, 2]), torch.tensor([15])]
    blocks = make_blocks(batch.tokens, batch.spans, anchors, B)
    with torch.no_grad():
        trained = block_hidden(model, batch, batch.taps.float(), target.embedding, blocks).view(-1, B, H)
    places = [(index, int(anchor)) for index, own in enumerate(anchors) for anchor in own]
    for block, (index, anchor) in enumerate(places):
        served = serve(model, target.embedding, sequences[index], anchor)
        assert torch.allclose(trained[block], served, atol=1e-5, rtol=0)
        check_draft(trainer, sequences[index], anchor, served, ids)


@torch.no_grad()
def check_draft(
    trainer: DSparkTrainer, sequence: Captured, anchor: int, served: torch.Tensor, ids: torch.Tensor
) -> None:
    """The evaluation drafts the same tokens with the same confidence."""
    state = {name: parameter.detach() for name, parameter in trainer.module.named_parameters()}
    w1, w2 = state["markov_head.markov_w1.weight"], state["markov_head.markov_w2.weight"]
    weight, bias = state["confidence_head.proj.weight"][0], state["confidence_head.proj.bias"][0]
    drafted = draft_everywhere(trainer.module, trainer.head, trainer.embedding, sequence)
    row = anchor - sequence.prompt_len
    previous = int(sequence.tokens[anchor])
    for slot, h in enumerate(served):
        e = w1[previous]
        confidence = float(weight @ torch.cat((h, e)) + bias)
        assert drafted.confidence[row, slot] == pytest.approx(confidence, abs=1e-4)
        if "markov_head.gate_proj.weight" in state:
            gate = (
                state["markov_head.gate_proj.weight"] @ torch.cat((h, e))
                + state["markov_head.gate_proj.bias"]
            )
            e = gate.sigmoid() * e
        previous = int(ids[(trainer.head.rows @ h + w2 @ e).argmax()])
        at = anchor + slot + 1
        known = at < len(sequence.tokens)
        assert drafted.supervised[row, slot] == known
        assert drafted.matches[row, slot] == (known and previous == int(sequence.tokens[at]))


# The loss


@pytest.mark.parametrize("markov_head", ["vanilla", "gated"])
@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
def test_the_loss_is_its_formula(
    target: ToyTarget, sequences: list[Captured], progress: float, markov_head: str
) -> None:
    """Value and every gradient, against autograd on whole-vocabulary matrices."""
    ids = torch.arange(V)[torch.arange(V) % 4 != 1]
    trainer = make_trainer(target, ids, markov_head=markov_head, anchors=6)
    model, batch = trainer.module, pack(sequences, generator(2, 0), CPU)
    loss, metrics = trainer.loss(batch, progress)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    again = generator(2, 0)
    anchors = [
        draw_anchors(last - first, prompt, 6, again)
        for (first, last), prompt in zip(batch.spans, batch.prompt_lens, strict=True)
    ]
    blocks = make_blocks(batch.tokens, batch.spans, anchors, B)
    hidden = block_hidden(model, batch, batch.taps, target.embedding, blocks)
    z = embedded = model.markov_head.markov_w1(blocks.previous)
    if model.markov_head.gate_proj is not None:
        z = torch.sigmoid(model.markov_head.gate_proj(torch.cat((hidden, embedded), -1))) * z
    q = torch.zeros(len(hidden), V)
    logits = hidden @ target.head[ids].T + z @ model.markov_head.markov_w2.weight.T
    q[:, ids] = logits.softmax(-1)
    p = (batch.hidden[blocks.rows].float() @ target.head.T).softmax(-1)
    entropy = -(p[:, ids] * q[:, ids].log()).sum(-1)
    share = {0.0: 1.0, 0.4: 0.7, 1.0: 0.1}[progress]
    rows = share * entropy + (1 - share) * (q - p).abs().sum(-1)
    weights = torch.tensor([math.exp(-(row % B) / 4) for row in range(len(q))]) * blocks.supervised
    accept = torch.minimum(q, p).sum(-1).detach()
    proj = model.confidence_head.proj
    confidence = torch.sigmoid(torch.cat((hidden, embedded), -1) @ proj.weight[0] + proj.bias)
    missed = -(accept * confidence.log() + (1 - accept) * (1 - confidence).log())
    expected = ((rows + 0.5 * missed) * weights).sum() / weights.sum()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0
        assert torch.allclose(found[name], parameter.grad, atol=2e-4 * scale + 1e-7, rtol=2e-3), name
    first = blocks.supervised.view(-1, B)[:, 0]
    assert float(metrics["accept1"]) == pytest.approx(float(accept.view(-1, B)[first, 0].mean()), rel=1e-4)


def test_the_best_constant_confidence_is_the_mean_acceptance(
    target: ToyTarget, sequences: list[Captured]
) -> None:
    trainer = make_trainer(target, block_size=1, anchors=100)
    proj = trainer.module.confidence_head.proj

    def slope(level: float) -> float:
        with torch.no_grad():
            proj.weight.zero_()
            proj.bias.fill_(math.log(level / (1 - level)))
        trainer.module.zero_grad()
        loss, metrics = trainer.loss(pack(sequences, generator(0, 0), CPU), 1.0)
        loss.backward()
        slope.mean = float(metrics["accept1"])  # type: ignore[attr-defined]
        return float(proj.bias.grad)

    slope(0.5)
    mean = slope.mean  # type: ignore[attr-defined]
    assert 0.0 < mean < 0.9
    assert slope(mean) == pytest.approx(0.0, abs=1e-6)
    assert slope(mean + 0.05) > 1e-3 and slope(mean - mean / 4) < -1e-4


def test_a_batch_without_anchors_is_harmless(target: ToyTarget) -> None:
    short = [target.answer([4, 5, 6], 1), target.answer([4], 0)]
    trainer = make_trainer(target)
    loss, metrics = trainer.loss(pack(short, generator(0, 0), CPU), 0.5)
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(metrics["accept1"]) == 0.0
    mixed = [*short, target.answer([1, 2], 9)]
    alone, _ = trainer.loss(pack(mixed[2:], generator(0, 0), CPU), 0.5)
    among, _ = trainer.loss(pack(mixed, generator(0, 0), CPU), 0.5)
    assert (
        float(among.detach()) == pytest.approx(float(alone.detach()), rel=1e-5)
        and float(alone.detach()) > 0.1
    )


# Evaluation


def test_rollouts_jump_past_what_was_accepted_and_leave_out_cut_blocks() -> None:
    matches = np.array(
        [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], bool
    )
    supervised = np.array([[1, 1, 1]] * 6 + [[1, 1, 0], [1, 0, 0]], bool)
    assert jump(matches, supervised) == [(0, 2), (3, 0), (4, 1)]
    assert jump(matches[6:], supervised[6:]) == []


def test_the_tally_keeps_uniform_and_rollout_figures_apart(
    target: ToyTarget, sequences: list[Captured]
) -> None:
    trainer = make_trainer(target)
    with torch.no_grad():
        parts = [draft_everywhere(trainer.module, trainer.head, target.embedding, s) for s in sequences[:2]]
    tally = Tally(B)
    for part in parts:
        tally.add(part)
    rounds = [accepted for part in parts for _, accepted in jump(part.matches, part.supervised)]
    figures = tally.figures("greedy")
    assert figures["greedy rollout-tau"] == pytest.approx(1 + np.mean(rounds))
    for slot in range(B):
        values = np.concatenate([part.agreement[part.supervised[:, slot], slot] for part in parts])
        assert figures[f"greedy uniform-{slot + 1}"] == pytest.approx(values.mean())
    assert tally.rollouts is not None
    assert tally.rollouts.accepted.tolist() == rounds and set(tally.rollouts.widths.tolist()) == {B}
    assert Tally(B).figures("sampled") == {} and Tally(B).rollouts is None


def test_sampled_text_is_judged_by_the_overlap_of_distributions(
    target: ToyTarget, sequences: list[Captured]
) -> None:
    ids = torch.arange(V)[torch.arange(V) % 4 != 1]
    trainer = make_trainer(target, ids)
    sequence = sequences[2]
    with torch.no_grad():
        drafted = draft_everywhere(trainer.module, trainer.head, target.embedding, sequence)
        batch = pack([sequence], generator(0, 0), CPU)
        blocks = make_blocks(batch.tokens, batch.spans, [torch.tensor([7])], B)
        hidden = block_hidden(trainer.module, batch, batch.taps, target.embedding, blocks)
        markov = trainer.module.markov_head
        q = (hidden @ trainer.head.rows.T + markov.bias(markov.embed(blocks.previous))).softmax(-1)
        p = (batch.hidden[7 : 7 + B].float() @ target.head.T).softmax(-1)[:, ids]
    expected = torch.minimum(q, p).sum(-1).numpy()
    assert drafted.agreement[7 - sequence.prompt_len] == pytest.approx(expected, abs=1e-5)


# Whole runs


@pytest.fixture(scope="module")
def dataset(target: ToyTarget, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Greedy answers of one toy target; two of them held out, one that was sampled."""
    path = tmp_path_factory.mktemp("captured")
    source = torch.Generator().manual_seed(4)
    with Writer(path, DatasetSpec("toy", "digest", H, V, TAPS)) as writer:
        for prompt in range(6):
            writer.append(target.answer([prompt, 3 * prompt], 40))
        writer.append(dataclasses.replace(target.answer([2, 6], 40), held_out=True))
        writer.append(dataclasses.replace(target.answer([1, 3], 40, source), held_out=True))
    return Reader(path)


def silent(progress: Progress) -> None:
    pass


def test_it_overfits_a_greedy_text(target: ToyTarget, dataset: Reader, tmp_path: Path) -> None:
    """Its rollouts on a text it was trained on commit 0.9 of the possible, within 200 steps."""
    reports: list[Progress] = []
    chosen = options(steps=200, block_size=4, soft_labels=False)
    train_dspark(dataset, target.weights, chosen, tmp_path, reports.append)
    held_out = reports[-1].held_out
    assert held_out["greedy rollout-tau"] >= 0.9 * 5
    assert held_out["greedy uniform-4"] >= 0.9
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["training"]["held_out"]["greedy rollout-tau"] == pytest.approx(
        held_out["greedy rollout-tau"], abs=1e-4
    )
    table = config["confidence_calibration"]["greedy"]
    assert [len(table[key]) for key in ("temperatures", "biases", "samples")] == [4, 4, 4]
    assert max(table["ece_after"]) <= 0.1


def test_a_run_is_deterministic_and_resumes(target: ToyTarget, dataset: Reader, tmp_path: Path) -> None:
    chosen = options(steps=6, draft_vocab_size=48)
    for name in ("one", "two"):
        train_dspark(dataset, target.weights, chosen, tmp_path / name, silent)

    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise Stop

    often = dataclasses.replace(chosen, loop=dataclasses.replace(chosen.loop, save_every=1, report_every=3))
    with pytest.raises(Stop):
        train_dspark(dataset, target.weights, often, tmp_path / "cut", stop)
    assert not (tmp_path / "cut" / "config.json").exists()
    train_dspark(dataset, target.weights, chosen, tmp_path / "cut", silent)
    one = load_file(tmp_path / "one" / "model.safetensors")
    for name in ("two", "cut"):
        other = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    other = dataclasses.replace(chosen, loop=dataclasses.replace(chosen.loop, seed=8))
    train_dspark(dataset, target.weights, other, tmp_path / "seed", silent)
    assert not torch.equal(load_file(tmp_path / "seed" / "model.safetensors")["fc.weight"], one["fc.weight"])
    changed = dataclasses.replace(chosen, confidence_weight=0.25)
    with pytest.raises(CheckpointError, match="confidence_weight was 0.5, now 0.25"):
        train_dspark(dataset, target.weights, changed, tmp_path / "one", silent)


@pytest.mark.parametrize("markov_head", ["vanilla", "gated"])
def test_the_export_has_the_published_layout(
    target: ToyTarget, dataset: Reader, tmp_path: Path, markov_head: str
) -> None:
    chosen = options(steps=1, taps=(2,), draft_vocab_size=48, markov_head=markov_head, inner_size=32)
    train_dspark(dataset, target.weights, chosen, tmp_path, silent)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {"fc.weight": (H, H), "hidden_norm.weight": (H,), "norm.weight": (H,), "mask_embedding": (H,)}
    for index in range(2):
        attention, mlp = f"layers.{index}.self_attn.", f"layers.{index}.mlp."
        expected |= {f"{attention}{name}_proj.weight": (rows, H) for name, rows in (("q", 64), ("k", 32))}
        expected |= {f"{attention}v_proj.weight": (32, H), f"{attention}o_proj.weight": (H, 64)}
        expected |= {f"{mlp}{name}_proj.weight": (32, H) for name in ("gate", "up")}
        expected |= {f"{mlp}down_proj.weight": (H, 32)}
        expected |= {f"layers.{index}.{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
    expected |= {"markov_head.markov_w1.weight": (V, 8), "markov_head.markov_w2.weight": (48, 8)}
    if markov_head == "gated":
        expected |= {"markov_head.gate_proj.weight": (8, H + 8), "markov_head.gate_proj.bias": (8,)}
    expected |= {"confidence_head.proj.weight": (1, H + 8), "confidence_head.proj.bias": (1,), "d2t": (48,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int32
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        "confidence_head.proj.weight", "confidence_head.proj.bias",
    }  # fmt: skip
    ids = torch.arange(48) + tensors["d2t"]
    assert ids.diff().min() > 0 and ids.min() >= 0 and ids.max() < V
    config = json.loads((tmp_path / "config.json").read_text())
    subset = {
        "architectures": ["LlamaDSparkModel"], "model_type": "llama", "num_hidden_layers": 2,
        "num_target_layers": 3, "block_size": B, "target_layer_ids": [1], "mask_token_id": None,
        "markov_rank": 8, "markov_head_type": markov_head, "enable_confidence_head": True,
        "confidence_head_with_markov": True, "draft_vocab_size": 48, "vocab_size": V, "hidden_size": H,
        "intermediate_size": 32, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float16",
        "target": {"name": "toy", "digest": "digest"},
    }  # fmt: skip
    assert {key: config[key] for key in subset} == subset
    check_loads(tmp_path, ids, config)


def check_loads(path: Path, ids: torch.Tensor, raw: dict[str, Any]) -> None:
    """Serving reads what training wrote: every tensor, the tap of stream 2, the calibration."""
    checkpoint, config, found = open_dspark(path, TargetSpec("llama", V, H, TARGET_LAYERS, 2, 16, 256))
    checkpoint.close()
    assert found is not None and torch.equal(found, ids)
    assert config.taps == (2,) and config.block_size == B and config.confidence_with_markov
    assert config.mask_token_id is None and config.gated == (raw["markov_head_type"] == "gated")
    for regime in ("greedy", "sampled"):
        table = raw["confidence_calibration"][regime]
        assert config.calibration[regime].temperatures == tuple(table["temperatures"])
        assert config.calibration[regime].biases == tuple(table["biases"])


def test_a_whole_vocabulary_needs_no_map_and_no_held_out_text_no_table(
    target: ToyTarget, tmp_path: Path
) -> None:
    with Writer(tmp_path / "data", DatasetSpec("toy", "digest", H, V, TAPS)) as writer:
        writer.append(target.answer([1, 2], 9))
    train_dspark(Reader(tmp_path / "data"), target.weights, options(steps=1), tmp_path / "out", silent)
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    checkpoint, config, ids = open_dspark(
        tmp_path / "out", TargetSpec("llama", V, H, TARGET_LAYERS, 2, 16, 256)
    )
    checkpoint.close()
    assert ids is None and config.calibration == {}


def test_weights_beyond_fp16_are_refused(target: ToyTarget) -> None:
    from xspec.train.dspark_export import tensors

    trainer = make_trainer(target)
    head: DraftHead = trainer.head
    with torch.no_grad():
        trainer.module.fc.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError, match="fc.weight"):
        tensors(trainer.module, head)


@pytest.mark.parametrize(
    ("taps", "complaint"),
    [
        ((2, 1), "ascending"),
        ((1, 1), "ascending"),
        ((), "ascending"),
        ((0, 1), "from 1 to 2"),
        ((1, 3), "from 1 to 2"),
        ((-1,), "from 1 to 2"),
    ],
)
def test_taps_that_make_no_sense_are_refused(taps: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_taps(options(taps=taps), TAPS)


def test_taps_the_dataset_lacks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"taps \[2\] are not in the dataset, which has \[1\]"):
        choose_taps(options(taps=(1, 2)), (1,))
    with pytest.raises(ConfigError, match="ascending"):
        choose_taps(options(), ())  # a dataset captured without taps


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"anchors": 0}, "anchors is 0"),
        ({"markov_head": "rnn"}, "allowed: vanilla, gated"),
        ({"confidence_weight": -1.0}, "confidence_weight is -1"),
        ({"confidence_weight": float("nan")}, "confidence_weight is nan"),
        ({"inner_size": 0}, "inner_size is 0"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        options(**change)


def test_a_head_of_another_model_is_refused(target: ToyTarget, dataset: Reader, tmp_path: Path) -> None:
    other = dataclasses.replace(target.weights, head=target.head[:-1])
    with pytest.raises(ConfigError, match="head is"):
        train_dspark(dataset, other, options(), tmp_path, silent)
