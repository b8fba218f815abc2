"""Parts every drafter's training shares: the dataset, the layer, the teacher, the loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from xspec.errors import CheckpointError, ConfigError
from xspec.train import dataset
from xspec.train.dataset import (
    Batch,
    Captured,
    DatasetSpec,
    Reader,
    Writer,
    choose_draft_vocab,
    count_answer_tokens,
    pack,
)
from xspec.train.layers import Attention, LayerSizes, RMSNorm, rotate
from xspec.train.loop import LoopOptions, Progress, batch_indices, generator, learning_rate, train
from xspec.train.loss import Teaching, cross_entropy_weight, draft_head, teach

CPU = torch.device("cpu")
SPEC = DatasetSpec("toy", "abc", hidden_size=8, vocab_size=32, taps=(1, 3))


def captured(length: int, seed: int, spec: DatasetSpec = SPEC, **flags: bool) -> Captured:
    source = torch.Generator().manual_seed(seed)
    shape = (length, spec.hidden_size)
    return Captured(
        torch.randint(0, spec.vocab_size, (length,), dtype=torch.int32, generator=source),
        torch.randn(shape, generator=source).bfloat16(),
        torch.randn(length, len(spec.taps), spec.hidden_size, generator=source).bfloat16(),
        torch.randn(length, generator=source),
        length // 3,
        **flags,
    )


def assert_same(found: Captured, wanted: Captured) -> None:
    for name in ("tokens", "hidden", "taps", "log_z"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert found.prompt_len == wanted.prompt_len
    assert (found.held_out, found.sampled) == (wanted.held_out, wanted.sampled)


# --- dataset


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = [captured(5, 0), captured(1, 1, held_out=True), captured(9, 2, sampled=True)]
    made.append(captured(4, 3, held_out=True, sampled=True))
    with Writer(tmp_path, SPEC) as writer:
        for one in made[:3]:
            writer.append(one)
    with Writer(tmp_path, SPEC) as writer:
        assert (writer.sequences, writer.tokens) == (3, 15)
        writer.append(made[3])
    reader = Reader(tmp_path, SPEC)
    assert (len(reader), reader.tokens) == (4, 19)
    assert (reader.training, reader.held_out) == ([0, 2], [1, 3])
    for index, one in enumerate(made):
        assert_same(reader.sequence(index), one)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["taps"] == [1, 3] and manifest["tokens"] == 19 and manifest["target"] == "toy"
    assert (tmp_path / "taps.bin").stat().st_size == 19 * 2 * 8 * 2


def test_a_reader_sees_what_was_there_when_it_opened(tmp_path: Path) -> None:
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(5, 0))
        writer.flush()
        reader = Reader(tmp_path)
        writer.append(captured(6, 1))
        assert len(Reader(tmp_path)) == 1  # not flushed
        writer.flush()
        assert len(reader) == 1 and len(Reader(tmp_path)) == 2


@pytest.mark.parametrize("name", ["tokens.bin", "hidden.bin", "taps.bin", "log_z.bin", "sequences.bin"])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_crash_loses_only_the_sequence_it_hit(tmp_path: Path, name: str, cut: int) -> None:
    made = [captured(5, 0), captured(7, 1)]
    with Writer(tmp_path, SPEC) as writer:
        writer.append(made[0])
        writer.flush()
        writer.append(made[1])
    file = tmp_path / name
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - cut)
    with Writer(tmp_path, SPEC) as writer:
        assert (writer.sequences, writer.tokens) == (1, 5)
        writer.append(made[1])
    reader = Reader(tmp_path)
    assert len(reader) == 2
    assert_same(reader.sequence(0), made[0])
    assert_same(reader.sequence(1), made[1])


def test_rows_without_a_record_are_dropped(tmp_path: Path) -> None:
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(5, 0))
    for name in ("tokens.bin", "hidden.bin"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"x" * 77)
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(3, 1))
    assert_same(Reader(tmp_path).sequence(1), captured(3, 1))
    assert (tmp_path / "tokens.bin").stat().st_size == 4 * 8


def test_no_taps_is_an_empty_file(tmp_path: Path) -> None:
    spec = replace(SPEC, taps=())
    with Writer(tmp_path, spec) as writer:
        writer.append(captured(5, 0, spec))
    assert Reader(tmp_path).sequence(0).taps.shape == (5, 0, 8)


def test_a_dataset_of_something_else_is_refused(tmp_path: Path) -> None:
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(5, 0))
    other = replace(SPEC, target_digest="def", taps=(2,))
    for opener in (Reader, Writer):
        with pytest.raises(
            CheckpointError, match=r"target_digest is 'abc', not 'def'; taps is \(1, 3\), not"
        ):
            opener(tmp_path, other)
    assert len(Reader(tmp_path, SPEC)) == 1  # the refused writer changed nothing


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', "\x00"])
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a dataset manifest"):
        Reader(tmp_path)


def test_missing_unknown_and_short_datasets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no captured dataset"):
        Reader(tmp_path / "nowhere")
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(5, 0))
    (tmp_path / "hidden.bin").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"hidden\.bin is 4 bytes long, its manifest needs 80"):
        Reader(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 9}))
    with pytest.raises(CheckpointError, match="version is 9, this release reads 1"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": torch.zeros(5, 7, dtype=torch.bfloat16)},
        {"hidden": torch.zeros(5, 8)},
        {"taps": torch.zeros(5, 1, 8, dtype=torch.bfloat16)},
        {"log_z": torch.zeros(4)},
        {"tokens": torch.zeros(5, dtype=torch.int64)},
        {"prompt_len": 6},
    ],
)
def test_a_malformed_sequence_is_refused_and_leaves_no_trace(tmp_path: Path, change: dict) -> None:
    with Writer(tmp_path, SPEC) as writer:
        with pytest.raises(ValueError):
            writer.append(replace(captured(5, 0), **change))
        writer.append(captured(5, 1))
    assert_same(Reader(tmp_path).sequence(0), captured(5, 1))


def test_reading_does_not_write(tmp_path: Path) -> None:
    with Writer(tmp_path, SPEC) as writer:
        writer.append(captured(5, 0))
    Reader(tmp_path).sequence(0).hidden.zero_()
    assert_same(Reader(tmp_path).sequence(0), captured(5, 0))


def test_packing_keeps_sequences_apart() -> None:
    made = [captured(5, 0), captured(3, 1)]
    batch = pack(made, generator(0, 0), CPU)
    assert batch.spans == [(0, 5), (5, 8)] and batch.prompt_lens == (1, 1)
    assert torch.equal(batch.tokens[5:], made[1].tokens.long())
    assert torch.equal(batch.taps[:5], made[0].taps)


def test_draft_vocabulary_is_the_most_counted_ties_to_low_ids(tmp_path: Path) -> None:
    counts = torch.tensor([0, 5, 3, 3, 9, 3, 0, 0])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 2, 4]
    assert choose_draft_vocab(counts, 4, always=[7]).tolist() == [1, 2, 4, 7]
    assert choose_draft_vocab(counts, 8).tolist() == list(range(8))
    for size, always in ((0, ()), (9, ()), (1, (0, 1))):
        with pytest.raises(ConfigError, match=f"draft_vocab_size is {size}, allowed: "):
            choose_draft_vocab(counts, size, always)
    with Writer(tmp_path, SPEC) as writer:
        for seed, held_out in ((0, False), (1, True)):
            writer.append(captured(9, seed, held_out=held_out))
    answer = captured(9, 0).tokens[3:].tolist()
    assert count_answer_tokens(Reader(tmp_path)).tolist() == [answer.count(id) for id in range(32)]


# --- layer


def test_attention_equals_a_loop_over_heads() -> None:
    torch.manual_seed(0)
    sizes = LayerSizes(16, 6, 2, 4, 8, 1e-5, 1e4)
    attention = Attention(sizes)
    x = torch.randn(2, 5, 16)
    positions = torch.arange(5).expand(2, 5)
    mask = torch.ones(5, 5).tril().bool()
    queries, (keys, values) = attention.queries(x, positions), attention.keys_values(x, positions)
    own = (torch.randn(2, 5, 3, 2, 4), torch.randn(2, 5, 3, 2, 4))
    for extra in (None, own):
        out = torch.zeros(2, 5, 6, 4)
        for head in range(6):
            group = head // 3
            for batch in range(2):
                for row in range(5):
                    key, value = keys[batch, : row + 1, group], values[batch, : row + 1, group]
                    if extra is not None:
                        key = torch.cat((key, extra[0][batch, row, :, group]))
                        value = torch.cat((value, extra[1][batch, row, :, group]))
                    weights = F.softmax(key @ queries[batch, row, head] / 2.0, dim=0)
                    out[batch, row, head] = weights @ value
        wanted = attention.o_proj(out.flatten(-2))
        torch.testing.assert_close(attention.mix(queries, keys, values, mask, extra), wanted)


def test_layer_parts_equal_the_kernels_of_inference() -> None:
    from xspec.kernels.reference import ReferenceKernels
    from xspec.nn.rope import Rope, RopeConfig, inverse_frequencies

    torch.manual_seed(0)
    kernels = ReferenceKernels(CPU)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(7, 3, 8).to(dtype)
        norm = RMSNorm(8, 1e-5)
        nn.init.normal_(norm.weight)
        assert torch.equal(norm(x), kernels.rms_norm(x, norm.weight.detach().to(dtype), 1e-5))
        positions = torch.arange(40, 47)
        heads = x.clone()
        kernels.rope_(heads, *Rope(inverse_frequencies(RopeConfig(1e5), 8), dtype, CPU)(positions))
        torch.testing.assert_close(rotate(x, positions, 1e5), heads)


# --- teacher


def toy_teaching(count: int = 40, vocab: int = 50, size: int = 12) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(7)
    head = torch.randn(vocab, size, generator=source)
    target = torch.randn(count, size, generator=source)
    hidden = torch.randn(count, size, generator=source)
    labels = torch.randint(0, vocab, (count,), generator=source)
    weights = torch.rand(count, generator=source)
    return head, target, hidden, labels, weights


@pytest.mark.parametrize("ce_weight", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_reduced_teacher_equals_the_full_vocabulary(ce_weight: float, shared: bool, soft: bool) -> None:
    head, target, hidden, labels, weights = toy_teaching()
    ids = torch.arange(0, 50, 3)
    rows = torch.randint(0, 9, (40,), generator=generator(0, 0)) if shared else None
    scores = target @ head.T
    teaching = Teaching(target, scores.logsumexp(-1), labels, weights, rows, soft)
    taught_hidden, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    taught = teach(taught_hidden, draft_head(head, ids), teaching, ce_weight, chunk_rows=7)

    p = scores.softmax(-1)
    p = p if rows is None else p[rows]
    q = torch.zeros(40, 50).index_copy(1, ids, (other @ head[ids].T).softmax(-1))
    inside = (labels % 3) == 0
    assert 0 < inside.sum() < 40
    cross_entropy = torch.where(inside, -q.gather(1, labels[:, None])[:, 0].clamp(min=1e-30).log(), 0.0)
    if soft:
        cross_entropy = -(p[:, ids] * q[:, ids].log()).sum(-1)
    distance = (q - p).abs().sum(-1)
    loss = (weights * (ce_weight * cross_entropy + (1 - ce_weight) * distance)).sum()
    torch.testing.assert_close(taught.loss, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(taught.accept, torch.minimum(q, p).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(taught.distance, distance, atol=1e-5, rtol=0)
    torch.testing.assert_close(taught.cross_entropy, cross_entropy, atol=1e-5, rtol=1e-5)
    assert torch.equal(taught.hit, q.argmax(-1) == labels)
    assert torch.equal(taught.agree, q.argmax(-1) == ids[p[:, ids].argmax(-1)])
    (3.0 * taught.loss).backward()
    (3.0 * loss).backward()
    torch.testing.assert_close(taught_hidden.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_bias_is_trained_too() -> None:
    head, target, hidden, labels, weights = toy_teaching()
    ids = torch.arange(0, 50, 3)
    teaching = Teaching(target, (target @ head.T).logsumexp(-1), labels, weights, soft=False)
    source = torch.Generator().manual_seed(1)
    made = [hidden, torch.randn(40, 4, generator=source), torch.randn(17, 4, generator=source)]
    ones, others = ([part.clone().requires_grad_() for part in made] for _ in range(2))
    taught = teach(ones[0], draft_head(head, ids), teaching, 0.3, (ones[1], ones[2]), chunk_rows=16)
    log_q = (others[0] @ head[ids].T + others[1] @ others[2].T).log_softmax(-1)
    p = (target @ head.T).softmax(-1)[:, ids]
    columns = draft_head(head, ids).columns[labels]
    cross_entropy = F.nll_loss(log_q, columns, ignore_index=-1, reduction="none")
    distance = (log_q.exp() - p).abs().sum(-1) + 1 - p.sum(-1)
    loss = (weights * (0.3 * cross_entropy + 0.7 * distance)).sum()
    torch.testing.assert_close(taught.loss, loss)
    taught.loss.backward()
    loss.backward()
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_accept_is_what_rejection_sampling_accepts() -> None:
    head, target, hidden, labels, weights = toy_teaching(count=3, vocab=9, size=4)
    ids = torch.tensor([0, 2, 3, 7, 8])
    teaching = Teaching(target, (target @ head.T).logsumexp(-1), labels, weights)
    taught = teach(hidden, draft_head(head, ids), teaching, 0.5)
    p = (target @ head.T).softmax(-1)
    q = (hidden @ head[ids].T).softmax(-1)
    draws, source = 200_000, torch.Generator().manual_seed(3)
    for row in range(3):
        drawn = torch.multinomial(q[row], draws, replacement=True, generator=source)
        ratio = p[row, ids[drawn]] / q[row, drawn]
        accepted = (torch.rand(draws, generator=source) < ratio).double().mean().item()
        assert accepted == pytest.approx(taught.accept[row].item(), abs=4 * 0.5 / draws**0.5)
        assert taught.accept[row].item() == pytest.approx(1 - taught.distance[row].item() / 2, abs=1e-6)


def test_no_rows_teach_nothing() -> None:
    head, target, hidden, labels, weights = (part[:0] for part in toy_teaching())
    head = toy_teaching()[0]
    hidden = hidden.clone().requires_grad_()
    taught = teach(hidden, draft_head(head, torch.arange(5)), Teaching(target, weights, labels, weights), 0.5)
    taught.loss.backward()
    assert taught.loss.item() == 0.0 and taught.hit.shape == (0,)


def test_offsets_map_columns_to_ids() -> None:
    head = draft_head(torch.randn(50, 4), torch.tensor([1, 2, 9, 49]))
    assert (torch.arange(4) + head.offsets).tolist() == [1, 2, 9, 49]
    assert head.offsets.dtype == torch.int32


# --- loop


def test_schedules() -> None:
    assert [cross_entropy_weight(at) for at in (0.0, 0.35, 0.425, 0.5, 1.0)] == pytest.approx(
        [1.0, 1.0, 0.55, 0.1, 0.1]
    )
    options = LoopOptions(100, warmup_steps=10, learning_rate=1.0)
    assert learning_rate(options, 0) == pytest.approx(0.1)
    assert learning_rate(options, 50) == pytest.approx(0.5)
    assert learning_rate(options, 100) == pytest.approx(0.0)


def test_each_sequence_is_seen_once_an_epoch() -> None:
    seen = [index for step in range(7) for index in batch_indices(7, 3, seed=5, step=step)]
    assert [sorted(seen[at : at + 7]) for at in (0, 7, 14)] == [list(range(7))] * 3
    assert seen[:7] != seen[7:14]
    assert batch_indices(7, 3, 5, 4) == seen[12:15]
    assert [index for step in range(7) for index in batch_indices(7, 3, seed=6, step=step)] != seen
    assert sorted(batch_indices(2, 6, 0, 0)) == [0, 0, 0, 1, 1, 1]  # fewer sequences than a step takes


class Line(nn.Module):
    """A Trainer that learns the mean hidden, with noise from the batch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.steps = 0
        self.fail_at = -1

    @property
    def module(self) -> nn.Module:
        return self

    def loss(self, batch: Batch, progress: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.steps == self.fail_at:
            raise KeyboardInterrupt
        self.steps += 1
        noise = torch.rand(8, generator=batch.generator)
        return (self.weight - batch.hidden.float().mean(0) - noise).square().sum(), {"x": noise[0]}

    def evaluate(self, reader: Reader) -> dict[str, float]:
        assert not self.training and not torch.is_grad_enabled()
        return {"held": float(len(reader.held_out))}


def line_run(path: Path, checkpoint: Path, line: Line, **changes: object) -> list[Progress]:
    options = LoopOptions(12, 3, 2, warmup_steps=2, report_every=4, evaluate_every=8, save_every=5)
    shown: list[Progress] = []
    train(line, Reader(path), replace(options, **changes), checkpoint, {"a": 1}, CPU, shown.append)
    return shown


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Writer(data, SPEC) as writer:
        for seed in range(7):
            writer.append(captured(5 + seed, seed, held_out=seed == 6))
    whole, parts = Line(), Line()
    shown = line_run(data, tmp_path / "whole.pt", whole)
    assert [one.step for one in shown] == [4, 8, 12]
    assert [dict(one.held_out) for one in shown] == [{}, {"held": 1.0}, {"held": 1.0}]
    assert "step 8/12" in str(shown[1]) and "held 1.000" in str(shown[1])
    parts.fail_at = 7
    with pytest.raises(KeyboardInterrupt):
        line_run(data, tmp_path / "parts.pt", parts)
    again = Line()
    line_run(data, tmp_path / "parts.pt", again)
    assert again.steps == 12 - 5
    assert torch.equal(whole.weight, again.weight)
    finished = Line()
    assert line_run(data, tmp_path / "parts.pt", finished) == [] and finished.steps == 0
    assert torch.equal(whole.weight, finished.weight)
    other = Line()
    line_run(data, tmp_path / "other.pt", other, seed=4)
    assert not torch.equal(whole.weight, other.weight)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Writer(data, SPEC) as writer:
        writer.append(captured(5, 0))
    checkpoint = tmp_path / "run.pt"
    line_run(data, checkpoint, Line())
    with pytest.raises(CheckpointError, match="learning_rate was 0.002, now 0.1; steps was 12, now 13"):
        line_run(data, checkpoint, Line(), steps=13, learning_rate=0.1)
    line_run(data, checkpoint, Line(), save_every=99)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        line_run(data, checkpoint, Line())


def test_damaged_states_and_empty_datasets_stop_the_run(tmp_path: Path) -> None:
    with Writer(tmp_path / "bad", SPEC) as writer:
        one = captured(5, 0)
        one.hidden[2, 3] = float("nan")
        writer.append(one)
    with pytest.raises(CheckpointError, match="step 0 is not finite"):
        line_run(tmp_path / "bad", tmp_path / "bad.pt", Line())
    with Writer(tmp_path / "empty", SPEC) as writer:
        writer.append(captured(5, 0, held_out=True))
    with pytest.raises(CheckpointError, match="no training sequences"):
        line_run(tmp_path / "empty", tmp_path / "empty.pt", Line())
    assert dataset.MANIFEST == "manifest.json"


def test_autocast_does_not_round_the_loss() -> None:
    head, target, hidden, labels, weights = toy_teaching()
    teaching = Teaching(target, (target @ head.T).logsumexp(-1), labels, weights)
    plain = teach(hidden, draft_head(head, torch.arange(50)), teaching, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = teach(hidden, draft_head(head, torch.arange(50)), teaching, 0.5)
    assert torch.equal(cast.loss, plain.loss) and torch.equal(cast.cross_entropy, plain.cross_entropy)
