"""Training of an Ouro in its parts: corpus, model, objective, schedule, figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from looped_dense import DenseOuro
from ouro_library import make_library
from torch.nn import functional as F

from xspec.errors import ConfigError
from xspec.train.loop import generator
from xspec.train.ouro import OuroOptions, make_optimizer, train_ouro
from xspec.train.ouro_corpus import CODE, END, Corpus, CorpusOptions, collect, prepare
from xspec.train.ouro_eval import distinct, greedy, match_flags, read_exits, read_windows, replay
from xspec.train.ouro_export import make_config
from xspec.train.ouro_loss import exit_log_probabilities, gate_loss, language_loss
from xspec.train.ouro_model import Cache, OuroModel, OuroSizes


class Killed(BaseException):
    """Not an error that anything may handle."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def corpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    options = CorpusOptions((str(library),), held_out=0.2, vocab_size=300)
    return prepare(options, tmp_path_factory.mktemp("corpus"))


def options_of(**changes: Any) -> OuroOptions:
    values = {
        "steps": 20, "warmup_steps": 2, "tokens_per_step": 64, "windows": ((32, 0.8), (64, 0.2)),
        "bf16": False,
        "save_every": 3, "report_every": 1,
    }  # fmt: skip
    return OuroOptions(**{**values, **changes})


def sizes_of(vocab: int = 300) -> OuroSizes:
    return OuroSizes(vocab, hidden=32, layers=2, heads=2, inner=48, loops=3)


@pytest.fixture(scope="module")
def model() -> OuroModel:
    """Random, with gates and gains that are not those of a new model."""
    model = OuroModel(sizes_of(), generator(5, 0)).eval()
    chosen = generator(5, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=chosen))
    return model.requires_grad_(False)


def ids(lanes: int, length: int) -> torch.Tensor:
    return torch.randint(300, (lanes, length), generator=generator(7, length))


# -- corpus ------------------------------------------------------------------------------------


def test_corpus_holds_what_it_should_and_splits_by_name(library: Path) -> None:
    documents = list(collect(CorpusOptions((str(library),), held_out=0.2, vocab_size=300)))
    names = {each.name for each in documents}
    assert len(documents) == 24 + 8 + 1 + 12 and not any("test_it" in n or "_sysconfig" in n for n in names)
    parts = {each.name: each.part for each in documents}
    assert parts["LICENSE.txt"] == "prose" and set(parts.values()) == {"train", "code", "prose"}
    topics = {parts[name] for name in names if "topics.py:" in name}
    assert topics <= {"train", "prose"} and "module_0.py" in names and "latin.py" not in names
    more = list(collect(CorpusOptions((str(library),), held_out=0.4, vocab_size=300)))
    held_out = {each.name for each in documents if each.held_out}
    assert held_out < {each.name for each in more if each.held_out}  # a greater share only adds


def test_tokenizer_writes_every_text_and_reads_it_back(corpus: Corpus) -> None:
    assert corpus.vocab_size == 300 and corpus.tokenizer.token_to_id(END) == 0
    counts = corpus.byte_counts()
    for text in ("    def step_3(self):\n\treturn\n", "Grüße, 世界 \U0001f600", "\x00\x7f \r\n"):
        found = corpus.tokenizer.encode(text, add_special_tokens=False).ids
        assert corpus.tokenizer.decode(found) == text
        assert int(counts[found].sum()) == len(text.encode())
    assert int(counts[0]) == 0 and sum(len(stream) for stream in corpus.held_out.values()) > 500


def test_a_corpus_is_made_once_and_never_mixed_up(library: Path, tmp_path: Path) -> None:
    options = CorpusOptions((str(library),), held_out=0.2, vocab_size=300)
    first = prepare(options, tmp_path)
    before = (tmp_path / "train.bin").stat().st_mtime_ns
    again = prepare(options, tmp_path)
    assert (
        torch.equal(first.training, again.training) and (tmp_path / "train.bin").stat().st_mtime_ns == before
    )
    with pytest.raises(ConfigError, match="holds a corpus of other files or of another split"):
        prepare(CorpusOptions((str(library),), held_out=0.3, vocab_size=300), tmp_path)
    with pytest.raises(ConfigError, match="has no text of prose to hold out"):
        (tmp_path / "one").mkdir()
        for n in range(9):
            (tmp_path / "one" / f"{n}.py").write_text(f"pass # {n}")
        prepare(CorpusOptions((str(tmp_path / "one"),), held_out=0.5), tmp_path / "two")


def test_windows_of_held_out_text_do_not_overlap(corpus: Corpus) -> None:
    stream = corpus.held_out[CODE]
    windows = corpus.windows(CODE, 10_000, 40)
    assert len(windows) == len(stream) // 40
    assert torch.equal(windows[0], stream[:40]) and torch.equal(windows[-1], stream[-40:])
    with pytest.raises(ConfigError, match="held-out code has .* too few for 1000000"):
        corpus.windows(CODE, 1, 1_000_000)


# -- the model ---------------------------------------------------------------------------------


def test_every_loop_equals_an_independent_computation(model: OuroModel) -> None:
    tokens = ids(2, 9)
    states = model.states(tokens)
    stops = model.exits(states).sigmoid()
    dense = DenseOuro(make_config(model.sizes, 64, 0), model.state_dict(), torch.float64)
    for lane in range(2):
        expected = dense(tokens[lane].tolist())
        for loop, state in enumerate(states):
            logits = model.logits(state)[lane].double()
            torch.testing.assert_close(logits, expected.logits[loop], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(stops[lane].T.double(), expected.stops[:-1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(states[0], states[1], atol=0.1)  # loops do something


def test_cached_steps_equal_the_whole_pass(model: OuroModel) -> None:
    tokens = ids(3, 12)
    whole = model.states(tokens)
    cache = Cache(model.sizes, 3, 12)
    parts = [
        model.states(tokens[:, :5], cache),
        *(model.states(tokens[:, n : n + 1], cache) for n in range(5, 12)),
    ]
    for loop, state in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[loop] for part in parts], 1), state, atol=1e-4, rtol=1e-4)


# -- objective ---------------------------------------------------------------------------------


def test_exit_distribution_is_the_papers() -> None:
    gates = torch.tensor([[0.0, 3.0], [1.0, -2.0]])
    first, second = gates.sigmoid()
    expected = torch.stack([first, (1 - first) * second, (1 - first) * (1 - second)])
    torch.testing.assert_close(exit_log_probabilities(gates).exp(), expected)


def test_expected_loss_weighs_each_loop_by_its_exit(model: OuroModel) -> None:
    windows = ids(2, 9)
    logits, p = [], None
    states = model.states(windows[:, :-1])
    logits = [model.logits(state).flatten(0, 1) for state in states]
    p = exit_log_probabilities(model.exits(states).flatten(0, 1).t()).exp()
    labels = windows[:, 1:].flatten()
    ce = torch.stack([-each.log_softmax(-1)[torch.arange(16), labels] for each in logits])
    entropy = -(p * p.log()).sum(0)
    loss, shown = language_loss(model, windows, "expected_loss", entropy_weight=0.1, distill_weight=0.0)
    torch.testing.assert_close(loss, ((p * ce).sum(0) - 0.1 * entropy).mean())
    assert shown["ce2"] == pytest.approx(float(ce[1].mean()), rel=1e-5)
    picks = logits[-1].argmax(-1)
    early = torch.stack([F.cross_entropy(each, picks) for each in logits[:-1]]).mean()
    taught, _ = language_loss(model, windows, "expected_loss", entropy_weight=0.1, distill_weight=0.5)
    torch.testing.assert_close(taught, loss + 0.5 * (early + ce[-1].mean()))
    last, _ = language_loss(model, windows, "last_loop", entropy_weight=0.1, distill_weight=0.5)
    torch.testing.assert_close(last, ce[-1].mean())


def test_gate_stage_moves_nothing_but_the_gate() -> None:
    model = OuroModel(sizes_of(), generator(1, 0))
    loss, metrics = gate_loss(model, ids(2, 9))
    loss.backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert 0.0 < metrics["should"] < 1.0
    decay = {
        id(p): g["weight_decay"]
        for g in make_optimizer(model, options_of()).param_groups
        for p in g["params"]
    }
    spared = {n for n, p in model.named_parameters() if decay[id(p)] == 0.0}
    assert {"model.embed_tokens.weight", "model.norm.weight", *moved} <= spared
    assert not any("proj" in name or "lm_head" in name for name in spared)


# -- training ----------------------------------------------------------------------------------


def trained(
    corpus: Corpus, folder: Path, options: OuroOptions, stop: int | None = None
) -> dict[str, torch.Tensor]:
    losses: list[float] = []

    def report(progress: Any) -> None:
        losses.append(progress.loss)
        if progress.step == stop:
            raise Killed

    model, _ = train_ouro(corpus, sizes_of(), options, folder / "training.pt", report)
    return {**model.state_dict(), "losses": torch.tensor(losses)}


def test_the_loss_falls(corpus: Corpus, tmp_path: Path) -> None:
    found = trained(corpus, tmp_path, options_of(steps=40, learning_rate=0.01))["losses"][:40]
    assert found[-4:].mean() < 0.7 * found[:4].mean()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if name != "losses")


def test_a_run_may_be_made_longer_or_shorter_until_its_rate_falls(corpus: Corpus, tmp_path: Path) -> None:
    """Either way it ends with the weights of a run that was to be that long from the start."""
    straight = trained(corpus, tmp_path, options_of(steps=10))
    for name, planned in (("longer", 20), ("shorter", 8)):
        (tmp_path / name).mkdir()
        with pytest.raises(Killed):
            trained(corpus, tmp_path / name, options_of(steps=planned), stop=4)
        assert equal(trained(corpus, tmp_path / name, options_of(steps=10)), straight)
    with pytest.raises(Killed):
        (tmp_path / "late").mkdir()
        trained(corpus, tmp_path / "late", options_of(steps=20), stop=10)
    with pytest.raises(ConfigError, match=r"--steps=10: .* has done 9; allowed: 20, or from 15"):
        trained(corpus, tmp_path / "late", options_of(steps=10))
    with pytest.raises(Killed):
        (tmp_path / "falling").mkdir()
        trained(corpus, tmp_path / "falling", options_of(steps=10), stop=9)
    with pytest.raises(ConfigError, match=r"--steps=40: .* has begun to wind down for --steps=10"):
        trained(corpus, tmp_path / "falling", options_of(steps=40))


def test_rates_and_windows_follow_the_schedule() -> None:
    options = options_of(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [options.rate(step) for step in range(options.all_steps)]
    assert rates[0] == 0.1 and rates[9:61] == [1.0] * 52 and rates[99] == pytest.approx(0.1, abs=0.01)
    assert rates[80] == pytest.approx(0.55) and rates[100] == 1.0 and len(rates) == 105
    assert [options.window(step) for step in (0, 79, 80, 104)] == [32, 32, 64, 64]
    for windows in (((64, 0.8), (32, 0.2)), ((32, 0.5), (64, 0.5)), ((32, 0.7),), ((1, 1.0),)):
        with pytest.raises(ConfigError, match="--windows"):
            options_of(windows=windows)


# -- figures -----------------------------------------------------------------------------------


def test_replay_counts_rounds_as_they_would_be() -> None:
    flags = torch.tensor([[[1, 1, 0, 1, 1, 1, 0]]], dtype=torch.bool)  # 8 tokens, the first from the prompt
    cell = replay(flags, 2, 1)
    # 2 of 2 accepted and one more (tokens 2 to 4), 2 of 2 and one more (5 to 7), none left to draft (8)
    assert (cell.rounds, cell.proposed, cell.accepted, cell.committed) == (3, 4, 4, 7)
    cell = replay(flags, 4, 1)
    # 2 of 4 accepted and the correction (2 to 4), 3 of 3, of which 4 are left, and one more (5 to 8)
    assert (cell.rounds, cell.proposed, cell.accepted, cell.committed) == (2, 7, 5, 7)
    assert cell.acceptance == pytest.approx(5 / 7) and cell.tokens_per_round == 3.5
    assert cell.speedup(4) == pytest.approx(4 * 3.5 / (4 + 4))
    assert replay(torch.zeros(2, 3, 5, dtype=torch.bool), 3, 2).accepted == 0


@pytest.mark.parametrize(("draft_steps", "depth"), [(1, 1), (3, 1), (4, 2)])
def test_replay_equals_real_drafting(draft_steps: int, depth: int, model: OuroModel) -> None:
    """A round by hand: draft with depth d from the text so far, compare with the full depth's picks."""
    prompt, count = ids(1, 6), 14
    answer = greedy(model, prompt, count)
    text = torch.cat((prompt, answer), 1)[0].tolist()

    def picks(tokens: list[int], loops: int) -> list[int]:
        state = model.states(torch.tensor([tokens]))[loops - 1]
        return model.logits(state)[0].argmax(-1).tolist()

    rounds = proposed = accepted = 0
    done, end = 7, 6 + count
    while done < end:
        width = min(draft_steps, end - done - 1)
        drafted = text[:done]
        for _ in range(width):
            drafted = [*drafted, picks(drafted, depth)[-1]]
        checked = picks(drafted, 3)[done - 1 :]
        good = 0
        while good < width and drafted[done + good] == checked[good]:
            good += 1
        assert [*drafted[done : done + good], checked[good]] == text[done : done + good + 1]
        rounds, proposed, accepted, done = rounds + 1, proposed + width, accepted + good, done + good + 1
    cell = replay(match_flags(model, prompt, answer), draft_steps, depth)
    assert (cell.rounds, cell.proposed, cell.accepted) == (rounds, proposed, accepted)


def test_reading_and_exits_agree(model: OuroModel) -> None:
    windows, counts = ids(3, 20), torch.full((300,), 2)
    reading = read_windows(model, windows, counts)
    logits = model.logits(model.states(windows[:, :-1])[1])
    nats = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert reading.bits_per_byte[1] == pytest.approx(nats / math.log(2) / 2, rel=1e-5)
    assert reading.matches[-1] == 1.0
    never, at_once = read_exits(model, windows, counts, (1.0 + 1e-6, 0.0))
    assert never.loops == 3.0 and never.bits_per_byte == pytest.approx(reading.bits_per_byte[-1], rel=1e-5)
    assert at_once.loops == 1.0 and at_once.bits_per_byte == pytest.approx(reading.bits_per_byte[0], rel=1e-5)
    assert distinct(torch.tensor([[1, 2, 1, 2, 1, 2]]), 2) == pytest.approx(2 / 5)
