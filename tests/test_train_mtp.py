"""The MTP trainer: its unroll is what serving does, it learns, it resumes, and what it exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from xspec.errors import CheckpointError, ConfigError
from xspec.train.dataset import Captured, DatasetSpec, Reader, Writer, pack
from xspec.train.layers import DecoderLayer, LayerSizes, RMSNorm, TargetWeights, initialise
from xspec.train.loop import LoopOptions, Progress, generator
from xspec.train.loss import draft_head
from xspec.train.mtp import (
    NORMED,
    RESIDUAL,
    MtpModel,
    MtpOptions,
    MtpTrainer,
    choose_chains,
    jump,
    train_mtp,
    unroll,
)

CPU = torch.device("cpu")
SIZES = LayerSizes(hidden=32, heads=4, kv_heads=2, head_dim=8, inner=64, norm_eps=1e-5, rope_theta=1e4)
VOCAB = 64
SPEC = DatasetSpec("toy", "abc", SIZES.hidden, VOCAB)


def make_model(seed: int = 0, std: float = 0.2) -> MtpModel:
    model = MtpModel(SIZES)
    initialise(model, generator(seed, 0), std)
    for module in model.modules():  # norms that all weigh 1 would hide a swap
        if isinstance(module, RMSNorm):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5, generator=generator(seed, 1))
    return model


def random_sequence(length: int, prompt_len: int, seed: int) -> Captured:
    source = torch.Generator().manual_seed(seed)
    return Captured(
        torch.randint(0, VOCAB, (length,), dtype=torch.int32, generator=source),
        torch.randn(length, SIZES.hidden, generator=source).bfloat16(),
        torch.zeros(length, 0, SIZES.hidden, dtype=torch.bfloat16),
        torch.randn(length, generator=source),
        prompt_len,
    )


class Cache:
    """What serving does, row by row: keys at positions, drafts overwritten by what the target confirms."""

    def __init__(self, model: MtpModel, embedding: torch.Tensor, step_hidden: str) -> None:
        self.model, self.embedding, self.step_hidden = model, embedding, step_hidden
        self.slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes its key, sees keys 1..position; returns the normed output and the hidden handed on."""
        layer = self.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        attention, at = layer.self_attn, torch.tensor([position])
        x = self.model.pair(self.embedding[token][None], hidden[None])
        normed = layer.input_layernorm(x)
        self.slots[position] = attention.keys_values(normed, at)
        seen = [self.slots[key] for key in range(1, position + 1)]
        keys, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
        attended = attention.mix(attention.queries(normed, at), keys, values, torch.ones(1, len(seen)).bool())
        stream = layer.finish(x, attended)
        out = self.model.shared_head.norm(stream)
        return out[0], stream[0] if self.step_hidden == RESIDUAL else out[0]


@pytest.mark.parametrize("step_hidden", [RESIDUAL, NORMED])
def test_unroll_equals_serving_row_by_row(step_hidden: str) -> None:
    model, embedding, steps = make_model(), torch.randn(VOCAB, SIZES.hidden), 4
    sequences = [random_sequence(12, 3, 0), random_sequence(2, 0, 1), random_sequence(9, 0, 2)]
    batch = pack(sequences, generator(0, 0), CPU)
    batch = replace(batch, hidden=batch.hidden.float())
    chains = choose_chains(batch, 1.0)
    assert chains.counts == (8, 0, 7)
    with torch.no_grad():
        outputs = unroll(model, embedding, batch, chains, steps, step_hidden)
        chain = 0
        for sequence, count in zip(sequences, chains.counts, strict=True):
            tokens, hidden = sequence.tokens.tolist(), sequence.hidden.float()
            cache = Cache(model, embedding, step_hidden)
            first = len(tokens) - 1 - count
            for anchor in range(1, len(tokens) - 1):
                # Published: every earlier position again from the target's hidden, as after a verify pass.
                for position in range(1, anchor):
                    cache.run(tokens[position], hidden[position - 1], position)
                handed = hidden[anchor - 1]
                for step in range(min(steps, len(tokens) - anchor)):
                    out, handed = cache.run(tokens[anchor + step], handed, anchor + step)
                    if anchor >= first:
                        torch.testing.assert_close(outputs[chain, step], out, atol=1e-5, rtol=1e-5)
                chain += anchor >= first
    assert chain == sum(chains.counts)


def test_a_chain_sees_nothing_it_should_not() -> None:
    """Neither target states past its anchor, nor other sequences, nor its sequence's first row."""
    model, embedding = make_model(), torch.randn(VOCAB, SIZES.hidden)
    made = [random_sequence(10, 0, 0), random_sequence(10, 4, 1)]
    batch = pack(made, generator(0, 0), CPU)
    batch = replace(batch, hidden=batch.hidden.float())
    chains = choose_chains(batch, 1.0)
    chain = chains.anchors.tolist().index(15)

    def output(changed: int | None, token: int | None = None) -> torch.Tensor:
        hidden, tokens = batch.hidden.clone(), batch.tokens.clone()
        if changed is not None:
            hidden[changed] += 1.0
        if token is not None:
            tokens[token] = (tokens[token] + 1) % VOCAB
        one = replace(batch, hidden=hidden, tokens=tokens)
        with torch.no_grad():
            return unroll(model, embedding, one, chains, 3, RESIDUAL)[chain]

    plain = output(None)
    for row in (*range(10), *range(15, 20)):
        assert torch.equal(output(row), plain), row
    for row in range(10, 15):
        assert not torch.equal(output(row), plain), row
    for row in (*range(10), 10, 18, 19):  # the token of row 10 was only ever seen by the target
        assert torch.equal(output(None, row), plain), row
    for row in range(11, 16):
        assert not torch.equal(output(None, row)[0], plain[0]), row
    for step in (1, 2):
        changed = output(None, 15 + step)
        assert torch.equal(changed[:step], plain[:step]) and not torch.equal(changed[step], plain[step])


def test_only_answers_are_supervised_and_a_share_of_them() -> None:
    batch = pack([random_sequence(400, 100, 0), random_sequence(300, 300, 1)], generator(0, 1), CPU)
    chains = choose_chains(batch, 1.0)
    assert chains.anchors.tolist() == list(range(100, 399)) and chains.counts == (299, 0)
    assert torch.equal(chains.positions, chains.anchors) and set(chains.ends.tolist()) == {399}
    some = choose_chains(batch, 0.5)
    assert 110 < len(some.anchors) < 190
    assert set(some.anchors.tolist()) < set(chains.anchors.tolist())


@pytest.mark.parametrize("step_hidden", [RESIDUAL, NORMED])
def test_loss_is_the_mean_over_steps_and_rows(step_hidden: str) -> None:
    """Against the plain formula over the full vocabulary, labels past the end ignored."""
    model = make_model()
    embedding = torch.randn(VOCAB, SIZES.hidden, generator=generator(7, 0))
    weights = TargetWeights(embedding, embedding, torch.ones(SIZES.hidden), SIZES, 512)
    ids = torch.arange(VOCAB)
    options = MtpOptions(LoopOptions(10), VOCAB, unroll=3, supervise=1.0, step_hidden=step_hidden)
    trainer = MtpTrainer(model, weights, draft_head(embedding, ids), options)
    sequences = [random_sequence(8, 2, 0), random_sequence(6, 0, 1)]
    batch = pack(sequences, generator(0, 0), CPU)
    batch = replace(batch, hidden=batch.hidden.float())
    log_p = (batch.hidden @ embedding.T).log_softmax(-1)
    batch = replace(batch, log_z=(batch.hidden @ embedding.T).logsumexp(-1))
    loss, metrics = trainer.loss(batch, 0.0)
    late, _ = trainer.loss(batch, 1.0)
    chains = choose_chains(batch, 1.0)
    outputs = unroll(model, embedding, batch, chains, 3, step_hidden).detach()
    total, total_late, share, accepted = 0.0, 0.0, 0.0, [[], [], []]
    for chain, (anchor, end) in enumerate(zip(chains.anchors.tolist(), chains.ends.tolist(), strict=True)):
        for step in range(3):
            if anchor + step + 1 > end:
                continue
            log_q = (outputs[chain, step] @ embedding.T).log_softmax(-1)
            p, q = log_p[anchor + step].exp(), log_q.exp()
            entropy = -(p * log_q).sum()
            total += 0.7**step * float(entropy)
            total_late += 0.7**step * float(0.1 * entropy + 0.9 * (p - q).abs().sum())
            share += 0.7**step
            accepted[step].append(float(torch.minimum(p, q).sum()))
    assert loss.item() == pytest.approx(total / share, rel=1e-5)
    assert late.item() == pytest.approx(total_late / share, rel=1e-5)
    for step in range(3):
        assert float(metrics[f"accept{step + 1}"]) == pytest.approx(
            sum(accepted[step]) / len(accepted[step]), rel=1e-4, abs=1e-6
        )


def test_jumping_counts_rounds_from_where_the_last_one_ended() -> None:
    assert jump([]) == (0, 0)
    assert jump([0, 0, 0]) == (3, 3)
    assert jump([2, 9, 9, 0, 1, 9]) == (6, 3)  # 0 -> 3 -> 4 -> 6
    # Uniform anchors would say (2 + 0 + 0) / 3 + 1 = 1.67 tokens a round.
    assert jump([0, 2, 0, 0]) == (4, 2)


# --- learning


class ToyTarget:
    """Two random layers; greedy text soon goes round in a circle."""

    def __init__(self) -> None:
        self.layers = [DecoderLayer(SIZES) for _ in range(2)]
        for index, layer in enumerate(self.layers):
            initialise(layer, generator(11, index), 0.15)
        self.norm = RMSNorm(SIZES.hidden, SIZES.norm_eps)
        self.embedding = torch.randn(VOCAB, SIZES.hidden, generator=generator(11, 8))
        self.head = torch.randn(VOCAB, SIZES.hidden, generator=generator(11, 9))
        self.weights = TargetWeights(self.embedding, self.head, self.norm.weight.detach(), SIZES, 512)

    @torch.no_grad()
    def answer(self, start: int, length: int, held_out: bool) -> Captured:
        tokens = [start, (7 * start + 3) % VOCAB]
        while True:
            hidden = self.hidden(tokens)
            if len(tokens) == length:
                break
            tokens.append(int((hidden[-1] @ self.head.T).argmax()))
        log_z = (hidden @ self.head.T).logsumexp(-1)
        taps = torch.zeros(length, 0, SIZES.hidden, dtype=torch.bfloat16)
        return Captured(torch.tensor(tokens, dtype=torch.int32), hidden.bfloat16(), taps, log_z, 2, held_out)

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        stream, positions = self.embedding[tokens], torch.arange(len(tokens))
        mask = positions[:, None] >= positions
        for layer in self.layers:
            normed = layer.input_layernorm(stream)
            attention = layer.self_attn
            keys, values = attention.keys_values(normed, positions)
            mixed = attention.mix(attention.queries(normed, positions), keys, values, mask)
            stream = layer.finish(stream, mixed)
        return self.norm(stream)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, TargetWeights]:
    path = tmp_path_factory.mktemp("toy")
    target = ToyTarget()
    with Writer(path, SPEC) as writer:
        for start in range(12):
            writer.append(target.answer(start, 48, held_out=False))
        for start in range(4):
            writer.append(target.answer(start, 48, held_out=True))
    return Reader(path, SPEC), target.weights


def toy_options(steps: int, **changes: object) -> MtpOptions:
    loop = LoopOptions(steps, 1, 6, 4e-3, 10, bf16=False, report_every=20, evaluate_every=steps, save_every=7)
    return replace(MtpOptions(loop, draft_vocab_size=VOCAB - 4), **changes)


def test_overfits_periodic_text(toy: tuple[Reader, TargetWeights], tmp_path: Path) -> None:
    reader, weights = toy
    assert len({tuple(reader.sequence(index).tokens[2:].tolist()) for index in reader.training}) > 3
    shown: list[Progress] = []
    train_mtp(reader, weights, toy_options(200), tmp_path, shown.append, CPU)
    held_out = shown[-1].held_out
    assert held_out["greedy tau"] >= 0.9 * (3 + 1)
    assert held_out["greedy 3-accept"] > 0.8  # the target is sure of itself, but not quite
    assert set(held_out) == {"greedy tau"} | {
        f"greedy {k}-{what}" for k in (1, 2, 3) for what in ("hit", "accept")
    }


def test_an_untrained_drafter_scores_one_token_a_round(toy: tuple[Reader, TargetWeights]) -> None:
    reader, weights = toy
    ids = torch.arange(VOCAB)
    trainer = MtpTrainer(make_model(3), weights, draft_head(weights.head, ids), toy_options(1))
    with torch.no_grad():
        assert 1.0 <= trainer.evaluate(reader)["greedy tau"] < 1.5


def test_resumed_training_ends_with_the_same_bits(toy: tuple[Reader, TargetWeights], tmp_path: Path) -> None:
    reader, weights = toy
    options = toy_options(16)
    train_mtp(reader, weights, options, tmp_path / "whole", lambda _: None, CPU)

    class Interrupted(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Interrupted

    every = replace(options, loop=replace(options.loop, report_every=1))
    with pytest.raises(Interrupted):
        train_mtp(reader, weights, every, tmp_path / "parts", stop, CPU)
    assert not (tmp_path / "parts/config.json").exists()
    train_mtp(reader, weights, options, tmp_path / "parts", lambda _: None, CPU)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    states = [torch.load(tmp_path / name / "training.pt", weights_only=True) for name in ("whole", "parts")]
    for name, tensor in states[0]["module"].items():
        assert torch.equal(tensor, states[1]["module"][name]), name
    with pytest.raises(CheckpointError, match="step_decay was 0.7, now 0.5"):
        train_mtp(reader, weights, replace(options, step_decay=0.5), tmp_path / "parts", lambda _: None, CPU)


def test_export_is_what_serving_loads(toy: tuple[Reader, TargetWeights], tmp_path: Path) -> None:
    reader, weights = toy
    options = toy_options(2, always_ids=(63, 62), inner_size=40, step_hidden=NORMED)
    train_mtp(reader, weights, options, tmp_path, lambda _: None, CPU)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "model.enorm.weight": (32,),
        "model.hnorm.weight": (32,),
        "model.eh_proj.weight": (32, 64),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32),
        f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.weight": (16, 32),
        f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (40, 32),
        f"{layer}mlp.up_proj.weight": (40, 32),
        f"{layer}mlp.down_proj.weight": (32, 40),
        "model.shared_head.norm.weight": (32,),
        "d2t": (60,),
    }
    assert all(tensor.dtype == torch.float16 for name, tensor in tensors.items() if name != "d2t")
    ids = torch.arange(60) + tensors["d2t"]
    assert ids.tolist() == sorted(set(ids.tolist())) and {62, 63} < set(ids.tolist())
    config = json.loads((tmp_path / "config.json").read_text())
    training = config.pop("training")
    assert config == {
        "architectures": ["LlamaMtpForCausalLM"],
        "model_type": "llama_mtp",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "vocab_size": 64,
        "draft_vocab_size": 60,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "torch_dtype": "float16",
        "target_hidden": "normed",
        "step_hidden": "normed",
        "target": {"name": "toy", "digest": "abc"},
    }
    assert (training["seed"], training["steps"], training["tokens"]) == (1, 2, 2 * 6 * 48)


def test_options_that_cannot_be_are_refused(toy: tuple[Reader, TargetWeights], tmp_path: Path) -> None:
    loop = LoopOptions(1)
    for change, words in (
        ({"step_hidden": "raw"}, "step_hidden is 'raw', allowed: residual, normed"),
        ({"unroll": 0}, "unroll is 0"),
        ({"supervise": 0.0}, "supervise is 0.0"),
        ({"supervise": 1.5}, "supervise is 1.5"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(MtpOptions(loop), **change)
    reader, weights = toy
    small = replace(weights, head=weights.head[:-1])
    with pytest.raises(ConfigError, match=r"head is \[63, 32\].*\[64, 32\]"):
        train_mtp(reader, small, toy_options(1), tmp_path, lambda _: None, CPU)
    with pytest.raises(ConfigError, match="draft_vocab_size is 65"):
        train_mtp(reader, weights, toy_options(1, draft_vocab_size=65), tmp_path, lambda _: None, CPU)


def test_a_batch_without_answers_moves_nothing(toy: tuple[Reader, TargetWeights]) -> None:
    _, weights = toy
    model = make_model()
    trainer = MtpTrainer(model, weights, draft_head(weights.head, torch.arange(VOCAB)), toy_options(1))
    loss, metrics = trainer.loss(
        pack([random_sequence(6, 6, 0), random_sequence(1, 0, 1)], generator(0, 0), CPU), 0.6
    )
    loss.backward()
    assert loss.item() == 0.0 and {float(value) for value in metrics.values()} == {0.0}
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
