"""What `xspec train` makes before and after the training: prompts, answers, hidden states, figures.

On tiny random targets. Everything is a function of the seed, interrupted or not, and what the capture keeps
is what the target computes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import engine_of, run, tokens
from tiny import CHAT_TEMPLATE, IM_END, make_checkpoint
from tiny_drafters import make_mtp
from tiny_dspark import Sizes, make_dspark, target_config

from xspec.config import Config
from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.draft.base import Drafter, Published
from xspec.draft.none import NoDrafter
from xspec.errors import CheckpointError, ConfigError, EngineError
from xspec.exec.assemble import Speculation
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import chunk_segments
from xspec.kernels.cpu import CpuKernels
from xspec.kv.layout import KVLayout
from xspec.kv.pool import KVPool
from xspec.models.loader import load_target
from xspec.platform.select import select_platform
from xspec.policy.fixed import FixedPolicy
from xspec.progress import silent
from xspec.text.chat import ChatTemplate
from xspec.text.tokenizer import TextAssets, load_text
from xspec.train import selfmade
from xspec.train.capture import CaptureDrafter, capture, log_normaliser
from xspec.train.dataset import DatasetSpec, Reader, Writer
from xspec.train.evaluate import PromptSet, Recorder, calibrate_dspark, evaluate_drafter
from xspec.train.evaluation import EvaluationOptions, pick, read_sets
from xspec.train.figures import Figures, FiguresFile, table
from xspec.train.journal import Journal, State, hold
from xspec.train.offline import Ask, OfflineEngine
from xspec.train.prompts import PromptOptions, TrainPrompt, arrange, is_held_out, make_prompts, read_encoded
from xspec.train.rollouts import AnswerOptions, ask, count_for, make_answers
from xspec.train.target import digest_of, load_weights, read_target, spread_taps

CPU = torch.device("cpu")
TAPS = (1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("train") / "llama", "llama", overrides=target_config())


@pytest.fixture(scope="module")
def text(model: Path) -> TextAssets:
    return load_text(model)


def config_of(model: Path, **flags: Any) -> Config:
    defaults = {"dtype": "float32", "max_seqs_per_batch": 6, "max_cache_size": 16 * 2**20}
    neutral = {"enable_prefix_cache": False, "disable_graph_warmup": True}
    return Config.from_mapping({"model": str(model), **defaults, **neutral, **flags})


def offline(model: Path, drafter: Drafter | None = None, **flags: Any) -> OfflineEngine:
    return OfflineEngine(
        config_of(model, **flags),
        select_platform("cpu"),
        model,
        make_drafter=lambda _: drafter or NoDrafter(),
        policy=FixedPolicy(),
        speculation=Speculation(),
        stop_ids=load_text(model).eos_ids,
        progress=silent,
    )


class Killed(BaseException):
    """Not an error that anything may handle."""


def killed_after(calls: int, fn: Callable[..., Any] = silent) -> Callable[..., Any]:
    left = calls

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return fn(*args, **kwargs)

    return wrapped


# -- journal and state -------------------------------------------------------------------------


def test_a_journal_drops_what_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    journal = Journal(path)
    journal.append([{"id": 0}, {"id": 1}])
    whole = path.read_bytes()
    journal.append([{"id": 2, "text": "é"}])
    kept = path.read_bytes()
    for torn in (b'{"id": 3}\n{"i', b'{"id": 3}\n'):
        path.write_bytes(kept + torn)
        journal = Journal(path)
        assert journal.count == 3 and path.read_bytes() == kept
    assert list(journal.read(1)) == [{"id": 1}, {"id": 2, "text": "é"}]
    journal.append([{"id": 3}])
    assert [record["id"] for record in Journal(path).read()] == [0, 1, 2, 3]
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="bytes long"):
        Journal(path)


def test_a_file_without_a_mark_counts_as_far_as_its_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 0}\n{"id": 1}\n{"id"')
    journal = Journal(path)
    assert journal.count == 2
    path.write_bytes(b'{"id": 0}\n[1, 222]\n')
    with pytest.raises(CheckpointError, match="line 2 is no JSON object"):
        list(journal.read())


def test_settings_must_not_change_under_what_was_made_with_them(tmp_path: Path) -> None:
    state = State(tmp_path / "run.json")
    state.compare("data", {"seed": 1}, "--work_dir")  # nothing was made yet
    state.settle("data", {"seed": 0, "temperatures": (0.7, 1.0)}, "--work_dir")
    state.finish("training")
    again = State(tmp_path / "run.json")
    again.settle("data", {"seed": 0, "temperatures": [0.7, 1.0]}, "--work_dir")
    assert again.done("training") and not again.done("export")
    with pytest.raises(ConfigError) as caught:
        again.compare("data", {"seed": 3, "temperatures": (0.7, 1.0), "held_out": 0.1}, "--work_dir")
    assert str(caught.value).splitlines() == [
        f"--held_out was null in {tmp_path}, now 0.1",
        f"--seed was 0 in {tmp_path}, now 3",
        "to change it, give another --work_dir",
    ]
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        State(tmp_path / "run.json")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with hold(new, "output"), pytest.raises(ConfigError, match="--output=.*new is in use by another"):
        hold(new, "output").__enter__()
    with hold(new, "output"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--work_dir=.*file/x cannot be written"):
        hold(tmp_path / "file" / "x", "work_dir").__enter__()


# -- the target's files ------------------------------------------------------------------------


def test_taps_are_spread_as_published_drafters_have_them() -> None:
    assert spread_taps(30) == (2, 9, 16, 23, 28)
    assert spread_taps(36) == (2, 10, 18, 26, 34)
    assert spread_taps(40) == (2, 11, 20, 29, 38)
    assert [spread_taps(layers) for layers in (2, 4, 6, 7)] == [
        (1,),
        (1, 2, 3),
        (1, 2, 3, 4, 5),
        (2, 3, 4, 5),
    ]
    for layers in range(2, 130):
        taps = spread_taps(layers)
        assert list(taps) == sorted(set(taps)) and taps[0] >= 1 and taps[-1] < layers and len(taps) <= 5
    with pytest.raises(ConfigError, match="--algorithm=DSpark needs a target of at least 2 layers"):
        spread_taps(1)


def test_the_digest_is_of_weights_and_config(model: Path, tmp_path: Path) -> None:
    same = make_checkpoint(tmp_path / "same", "llama", overrides=target_config())
    other = make_checkpoint(tmp_path / "other", "llama", overrides=target_config(), seed=1)
    (same / "README.md").write_text("words")
    assert digest_of(same) == digest_of(model) != digest_of(other)
    assert digest_of(same / "README.md") == digest_of(same / "README.md") != digest_of(same / "config.json")


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_shared_weights_are_the_targets(variant: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / variant, variant)
    files = read_target(str(path))
    weights = load_weights(files, torch.float32)
    target = load_target(path, CpuKernels(), dtype=torch.float32, device=CPU)
    ids = torch.arange(files.config.vocab_size)
    assert torch.equal(weights.embedding, target.embed(ids))
    assert torch.equal(weights.head, target.head_rows(ids))
    hidden = torch.randn(5, files.config.hidden_size)
    torch.testing.assert_close(hidden @ weights.head.T, target.logits(hidden), atol=1e-4, rtol=1e-5)
    assert torch.equal(weights.norm, target._layers._norm.weights.weight)
    assert (weights.sizes.heads, weights.sizes.kv_heads, weights.sizes.inner) == (4, 2, 96)
    assert files.name == variant and files.end_ids == (0, 2)


# -- prompts -----------------------------------------------------------------------------------


def test_held_out_prompts_are_spread_evenly() -> None:
    assert [i for i in range(100) if is_held_out(i, 0.04)] == [24, 49, 74, 99]
    assert sum(is_held_out(i, 0.1) for i in range(1000)) == 100
    assert not any(is_held_out(i, 0.0) for i in range(1000))


def test_prompts_are_arranged_from_the_seed(caplog: pytest.LogCaptureFixture) -> None:
    found = [(f"s{i % 3}", (i,) * (1 + i % 5)) for i in range(50)] + [("s0", (1, 1)), ("s1", ())]
    options = PromptOptions(max_tokens=4, held_out=0.1)
    with caplog.at_level(logging.INFO):
        prompts = arrange(found, options)
    assert "10 of 52 prompts have more than 4 tokens" in caplog.text
    assert "2 of 52 prompts occur twice or are empty" in caplog.text
    assert len(prompts) == 40 and sum(prompt.held_out for prompt in prompts) == 4
    assert {(p.source, p.ids) for p in prompts} == {(s, ids) for s, ids in found[:50] if len(ids) <= 4}
    assert arrange(found, options) == prompts
    assert arrange(found, dataclasses.replace(options, seed=1)) != prompts
    with pytest.raises(ConfigError, match="longer than --max_prompt_tokens=4"):
        arrange([("s", (1,) * 5)], options)
    with pytest.raises(ConfigError, match=r"--held_out=1.0 leaves none of 40"):
        arrange(found, dataclasses.replace(options, held_out=1.0))


def test_files_are_encoded_as_serving_would(tmp_path: Path, text: TextAssets) -> None:
    jsonl, plain = tmp_path / "q.jsonl", tmp_path / "prose.txt"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    jsonl.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"turns": ["one", "two"]}) + "\n")
    plain.write_text("short\n\nthe other line of text is in it, and it is longer\n", encoding="utf-8")
    options = PromptOptions(files=(str(jsonl),), continue_text=(str(plain),), continue_tokens=9)
    found = list(read_encoded(options, text))
    encode = text.tokenizer.encode
    assert found == [
        ("q", tuple(encode(
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False))),
        ("q", tuple(encode("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
                           add_special_tokens=False))),
        ("prose", tuple(encode("the other line of text is in it, and it is longer")[:9])),
    ]  # fmt: skip
    bare = list(read_encoded(PromptOptions(files=(str(plain),), chat=False), text))
    assert bare[0] == ("prose", tuple(encode("short")))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (PromptOptions(files=("/nowhere.txt",)), "--prompts=/nowhere.txt cannot be read"),
        (PromptOptions(continue_text=("/nowhere.txt",)), "--continue_text=/nowhere.txt cannot be read"),
        (PromptOptions(continue_text=(__file__,), continue_tokens=500), "no line of more than 500 tokens"),
    ],
)
def test_files_that_cannot_be_used_name_their_flag(
    options: PromptOptions, complaint: str, text: TextAssets
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        list(read_encoded(options, text))


def test_files_count_by_name_and_content(tmp_path: Path) -> None:
    for folder, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.txt").write_text(content)
    a, b, c = (PromptOptions(files=(str(tmp_path / f / "p.txt"),)).settings() for f in "abc")
    assert a == b != c


# -- prompts the model makes up ----------------------------------------------------------------


def test_user_turns_are_finished() -> None:
    chat, task = selfmade.Opening("chat", "How", 1, 9), selfmade.Opening("code", "def", 1, 9, wrapper="W\n")
    assert selfmade.finish(chat, " do birds fly? ") == "How do birds fly?"
    assert selfmade.finish(chat, " is it") is None
    end = '"""\n\n```'
    assert (
        selfmade.finish(task, ' f_x(a: int) -> int:\n    """ Add one to a number. """\n    return a + 1\n')
        == f'W\ndef f_x(a: int) -> int:\n    """ Add one to a number.\n    {end}'
    )
    for body in (
        "\n    return a",
        '\n    """short"""',
        '\n    x = 1\n    """ A string further down. """',
        "\n",
    ):
        made = selfmade.finish(task, f" count_up(a):{body}```\ntext")
        assert made == f'W\ndef count_up(a):\n    """ Count up of the given input.\n    {end}'
    assert selfmade.finish(task, " is a word that begins definitions") is None
    assert selfmade.until([5, 6, 2, 7], frozenset({2})) == [5, 6]
    assert selfmade.until([5, 6], frozenset({2})) == [5, 6]


def test_any_number_of_turns_has_the_mix() -> None:
    cycle = selfmade._CYCLE
    assert len(cycle) == sum(opening.share for opening in selfmade.OPENINGS)
    assert all(cycle.count(opening) == opening.share for opening in selfmade.OPENINGS)
    assert {opening.source for opening in cycle[:15]} == {"chat", "code", "maths", "prose"}


def test_a_turn_begins_where_the_template_says(text: TextAssets) -> None:
    assert selfmade.user_turn_head(text, chat=True) == "<|im_start|>user\n"
    assert selfmade.user_turn_head(text, chat=False) == ""
    twice = dataclasses.replace(text, chat=ChatTemplate(CHAT_TEMPLATE + "{{ messages[0]['content'] }}"))
    with pytest.raises(ConfigError, match="--self_prompts: .* prints a user turn 2 times"):
        selfmade.user_turn_head(twice, chat=True)


def test_made_up_prompts_are_the_same_after_a_kill(model: Path, text: TextAssets, tmp_path: Path) -> None:
    options = PromptOptions(self_prompts=14, max_tokens=200, held_out=0.2)
    engine = offline(model)

    def make(work: Path, progress: Any) -> list[TrainPrompt]:
        return make_prompts(options, work, text, lambda: engine, group=4, progress=progress)

    whole = make(tmp_path / "whole", silent)
    assert len(whole) >= 5 and any(prompt.held_out for prompt in whole)
    head = tuple(text.tokenizer.encode("<|im_start|>user\n", add_special_tokens=False))
    tail = text.tokenizer.encode(f"{IM_END}\n<|im_start|>assistant\n", add_special_tokens=False)
    for prompt in whole:
        assert prompt.ids[: len(head)] == head and list(prompt.ids[-len(tail) :]) == tail
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(engine, "answer", killed_after(2, engine.answer))
        make(tmp_path / "cut", silent)
    assert Journal(tmp_path / "cut" / "self_prompts.jsonl").count == 8
    assert make(tmp_path / "cut", silent) == whole
    for name in ("self_prompts.jsonl", "prompts.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Once they stand there, nothing is asked again.
    assert make_prompts(options, tmp_path / "cut", text, killed_after(0), group=4, progress=silent) == whole


# -- answers -----------------------------------------------------------------------------------

PROMPTS = [TrainPrompt("s", tuple(range(3 + i, 12 + 2 * i)), is_held_out(i, 0.25)) for i in range(9)]
ANSWERS = AnswerOptions(tokens=160, max_tokens=16, group=4)


def test_what_is_asked_follows_from_the_seed() -> None:
    options = AnswerOptions(greedy_share=0.5, temperatures=(0.7, 1.0))
    prompts = [TrainPrompt("s", (i,), False) for i in range(400)]
    asks = [ask(number, prompts, options) for number in range(800)]
    greedy = [number for number, one in enumerate(asks) if one.temperature == 0.0]
    assert 160 < len(greedy) < 240 and max(greedy) < 400  # later passes only sample
    drawn = [one.temperature for one in asks if one.temperature]
    assert min(drawn) >= 0.7 and max(drawn) <= 1.0 and max(drawn) - min(drawn) > 0.29
    assert asks[403].prompt_ids == asks[3].prompt_ids and asks[403].seed != asks[3].seed
    assert [ask(number, prompts, options) for number in range(800)] == asks
    assert ask(0, prompts, dataclasses.replace(options, seed=1)) != asks[0]


@pytest.fixture(scope="module")
def answered(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Journal:
    journal = Journal(tmp_path_factory.mktemp("answers") / "answers.jsonl")
    assert make_answers(PROMPTS, ANSWERS, journal, lambda: offline(model), silent) >= 160
    return journal


def test_answers_stop_where_enough_are_made(answered: Journal) -> None:
    records = list(answered.read())
    lengths = [len(record["answer_ids"]) for record in records]
    assert sum(lengths[:-1]) < 160 <= sum(lengths) and max(lengths) <= 16
    assert [record["id"] for record in records] == list(range(len(records)))
    assert len(records) > len(PROMPTS)  # on to a second pass
    assert [count_for(answered, n) for n in (1, lengths[0], lengths[0] + 1, 160, 10**6)] == [
        1, 1, 2, len(records), len(records),
    ]  # fmt: skip
    for record in records:
        prompt, asked = PROMPTS[record["id"] % 9], ask(record["id"], PROMPTS, ANSWERS)
        assert tuple(record["prompt_ids"]) == prompt.ids and record["held_out"] == prompt.held_out
        assert (record["temperature"], record["seed"]) == (asked.temperature, asked.seed)
        ended = record["answer_ids"][-1] in (0, 2)
        assert ended or len(record["answer_ids"]) == 16
        assert not set(record["answer_ids"][:-1]) & {0, 2}


def test_answers_are_those_of_the_engine(model: Path, tmp_path: Path) -> None:
    """In fp64 the text of a request is a function of prompt, parameters and seed alone."""
    journal = Journal(tmp_path / "a.jsonl")
    make_answers(PROMPTS, dataclasses.replace(ANSWERS, tokens=60), journal,
                 lambda: offline(model, dtype="float64"), silent)  # fmt: skip

    async def alone() -> list[tuple[int, ...]]:
        async with engine_of(model) as engine:
            return [
                tokens(await run(engine, record["prompt_ids"], max_tokens=16, seed=record["seed"],
                                 temperature=record["temperature"]))
                for record in journal.read()
            ]  # fmt: skip

    assert [tuple(record["answer_ids"]) for record in journal.read()] == asyncio.run(alone())


def test_answers_are_the_same_after_a_kill(model: Path, answered: Journal, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(Killed):  # inside the second group
        make_answers(PROMPTS, ANSWERS, Journal(path), lambda: offline(model), killed_after(25))
    assert Journal(path).count == 4
    make_answers(PROMPTS, ANSWERS, Journal(path), lambda: offline(model), silent)
    assert path.read_bytes() == answered.path.read_bytes()
    make_answers(PROMPTS, ANSWERS, Journal(path), killed_after(0), silent)  # complete: no engine is opened


def test_greedy_answers_are_not_asked_for_twice(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = AnswerOptions(tokens=10**6, max_tokens=4, group=100, greedy_share=1.0)
    journal = Journal(tmp_path / "a.jsonl")
    made = make_answers(PROMPTS, options, journal, lambda: offline(model), silent)
    assert journal.count == 9 and made <= 36
    assert "fewer than --tokens=1000000" in caplog.text


class Broken(NoDrafter):
    def publish(self, published: Published) -> None:
        raise RuntimeError("out of order")


def test_a_lost_round_is_an_error_and_not_an_answer(model: Path) -> None:
    with pytest.raises(EngineError, match="a round failed: out of order"):
        offline(model, Broken()).answer([Ask((5, 6, 7), 4)])
    engine = offline(model, max_model_len=8)
    for ids in ((), tuple(range(8))):
        with pytest.raises(EngineError, match="in a context of 8"):
            engine.answer([Ask(ids, 4)])


# -- hidden states -----------------------------------------------------------------------------


def direct(
    model: Path, sequence: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden [L, H], taps [L, m, H] and log Z [L] of one pass over the whole sequence."""
    kernels, length = CpuKernels(), len(sequence)
    target = load_target(model, kernels, dtype=dtype, device=CPU)
    pool = KVPool(KVLayout(target.spec.planes, 512, dtype), 3, kernels, CPU)
    rows = DeviceRows(1, 1, 512, CPU, sink_page=pool.sink_page)
    rows.page_table[1] = 1
    inputs = rows.chunk_inputs(torch.tensor([1]), [0], [length], chunk_segments([length], [1]))
    with torch.inference_mode():
        hidden = target.forward(torch.tensor(sequence), inputs, pool.target, TAPS)
        log_z = target.logits(hidden.last).double().logsumexp(-1).float()
    return hidden.last, torch.stack(hidden.taps, 1), log_z


CHUNKS = {"max_tokens_per_chunk_for_prefill": 7, "max_tokens_per_batch": 20, "block_size": 8}


@pytest.mark.parametrize(
    ("dtype", "flags", "tolerance"),
    [
        ("float32", {"max_seqs_per_batch": 1}, 1e-6),  # the very same passes
        ("float64", CHUNKS, 1e-9),
        ("float64", {**CHUNKS, "max_seqs_per_batch": 2}, 1e-9),
        ("float32", CHUNKS, 5e-5),  # products of other shapes round differently
    ],
)
def test_captured_states_are_those_of_a_direct_pass(
    model: Path, dtype: str, flags: dict[str, Any], tolerance: float
) -> None:
    sequences = [tuple(range(5, 5 + n)) for n in (1, 7, 8, 30, 41, 22)] + [tuple(range(60, 95))] * 2
    drafter = CaptureDrafter(TAPS)
    engine = offline(model, drafter, dtype=dtype, **flags)
    for _ in range(2):
        engine.answer([Ask(sequence, 1) for sequence in sequences])
        states = drafter.collect()
        assert set(states) == set(sequences) and drafter.collect() == {}
        for sequence in sequences:
            found = states[sequence]
            got = (found.hidden, found.taps, log_normaliser(engine.parts.target, found.hidden))
            for ours, theirs in zip(got, direct(model, sequence, getattr(torch, dtype)), strict=True):
                assert ours.dtype == theirs.dtype
                log_tolerance = max(tolerance, 1e-6) if ours.dim() == 1 else tolerance  # kept as fp32
                torch.testing.assert_close(ours, theirs, atol=log_tolerance, rtol=log_tolerance)


def spec_of(model: Path) -> DatasetSpec:
    return DatasetSpec("tiny", digest_of(model), 64, 320, TAPS)


def capture_into(model: Path, answered: Journal, writer: Writer) -> None:
    def opened() -> tuple[OfflineEngine, CaptureDrafter]:
        drafter = CaptureDrafter(TAPS)
        return offline(model, drafter, **CHUNKS), drafter

    capture(answered, answered.count, writer, opened, silent, at_once=4)


def test_the_dataset_holds_the_answers_and_their_states(
    model: Path, answered: Journal, tmp_path: Path
) -> None:
    with Writer(tmp_path, spec_of(model)) as writer:
        capture_into(model, answered, writer)
    reader = Reader(tmp_path, spec_of(model))
    records = list(answered.read())
    part = Reader(tmp_path, spec_of(model), limit=5)
    assert len(part) == 5 and sorted(part.training + part.held_out) == [0, 1, 2, 3, 4]
    assert torch.equal(part.sequence(4).hidden, reader.sequence(4).hidden)
    assert len(reader) == len(records) > 8
    assert any(reader.sequence(i).sampled for i in range(len(reader)))
    for index, record in enumerate(records):
        found = reader.sequence(index)
        sequence = [*record["prompt_ids"], *record["answer_ids"]]
        assert found.tokens.tolist() == sequence and found.prompt_len == len(record["prompt_ids"])
        assert (found.held_out, found.sampled) == (record["held_out"], record["temperature"] > 0)
        hidden, taps, log_z = direct(model, sequence)
        torch.testing.assert_close(found.log_z, log_z, atol=5e-5, rtol=1e-6)
        for kept, exact in ((found.hidden, hidden), (found.taps, taps)):
            # Rounded once to bf16, on top of what products of other shapes round.
            torch.testing.assert_close(kept.float(), exact, atol=5e-5, rtol=2**-8)


@pytest.mark.parametrize("cut", [0, 2, 4, 7])
def test_capture_is_the_same_after_a_kill(
    model: Path, answered: Journal, tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "whole", spec_of(model)) as writer:
        capture_into(model, answered, writer)
    writer = Writer(tmp_path / "cut", spec_of(model))
    monkeypatch.setattr(writer, "append", killed_after(cut, writer.append))
    with pytest.raises(Killed):
        capture_into(model, answered, writer)
    assert writer.sequences == cut
    del writer  # as a kill does: no close
    with Writer(tmp_path / "cut", spec_of(model)) as writer:
        capture_into(model, answered, writer)
    for file in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes(), file.name
    with Writer(tmp_path / "cut", spec_of(model)) as writer:
        # Complete: no engine is opened.
        capture(answered, answered.count, writer, killed_after(0), silent)


def test_capture_refuses_a_prefix_cache(model: Path) -> None:
    engine = offline(model, CaptureDrafter(TAPS), enable_prefix_cache=True, block_size=4)
    engine.answer([Ask(tuple(range(5, 25)), 1)])
    with pytest.raises(EngineError, match="prefix-cache hit leaves some out"):
        engine.answer([Ask(tuple(range(5, 25)), 1)])
    with pytest.raises(ValueError, match="cannot draft 2 steps"):
        CaptureDrafter(TAPS).draft(None, 2)  # type: ignore[arg-type]


# -- figures -----------------------------------------------------------------------------------


def told(*rows: tuple[int, int, int, int, bool], signals: Any = None) -> RoundFeedback:
    """Rows of (proposed, admitted, verified, committed, censored)."""
    found = tuple(RowFeedback(index, *row) for index, row in enumerate(rows))
    shown = np.full((len(rows), 3), 0.5, dtype=np.float32) if signals is None else signals
    return RoundFeedback(SpeculationPlan(0, "fixed", 3), RoundShape(1, 1, 0, 1), found, None, 0, 0, shown)


def test_figures_of_rounds() -> None:
    recorder = Recorder(3, 3)
    assert recorder.figures("p", 0.0, []).mean_accepted_length is None
    recorder.observe(told((3, 3, 3, 4, False), (3, 3, 3, 1, False)))
    recorder.observe(told((3, 3, 3, 3, False), (1, 1, 1, 1, False)))  # the second had room for one draft
    recorder.observe(told((2, 3, 2, 2, True)))  # ended inside its accepted run
    recorder.observe(told((0, 0, 0, 1, False)))  # had no room for a draft: no round of the drafter's
    recorder.observe(dataclasses.replace(told((0, 0, 0, 1, False)), signals=None))  # a plain round
    found = recorder.figures("p", 0.5, [(1, 2), (3,)])
    # accepted 3, 0, 2, 0, 2 of verified 3, 3, 3, 1, 2
    assert (found.rounds, found.answer_tokens, found.sequences) == (5, 3, 2)
    assert found.mean_accepted_length == pytest.approx(1 + 7 / 5)
    assert found.acceptance == pytest.approx((3 / 5, 3 / 3, 1 / 2))
    recorder.clear()
    assert recorder.rollouts() is None and recorder.figures("p", 0.0, []).rounds == 0


def test_confidences_come_back_as_logits() -> None:
    recorder = Recorder(2, 2)
    signals = np.array([[0.5, 1.0], [0.9, 0.0]], dtype=np.float32)
    recorder.observe(told((2, 2, 2, 3, False), (2, 2, 2, 1, False), signals=signals))
    rollouts = recorder.rollouts()
    assert rollouts is not None
    extreme = np.log(1e-6) - np.log1p(-1e-6)
    assert rollouts.logits == pytest.approx(np.array([[0.0, -extreme], [np.log(9), extreme]]), rel=1e-5)
    assert rollouts.accepted.tolist() == [2, 0] and rollouts.widths.tolist() == [2, 2]


SETS = [
    PromptSet("a", tuple(prompt.ids for prompt in PROMPTS[:4])),
    PromptSet("b", tuple(prompt.ids for prompt in PROMPTS[4:])),
]


def test_figures_are_what_the_engine_counts(model: Path, tmp_path: Path) -> None:
    """The same requests to the asyncio engine with the same drafter, in fp64."""
    drafter = make_mtp(tmp_path / "mtp", draft_ids=torch.arange(3, 250))
    flags = {"draft_model": str(drafter), "num_speculative_tokens": 4, "enable_probabilistic_draft": True}
    options = config_of(model, dtype="float64", **flags)
    found = list(evaluate_drafter(options, SETS, max_tokens=20, temperatures=(0.0, 30.0), seed=3))
    assert [(one.prompts, one.temperature) for one in found] == [("a", 0), ("a", 30), ("b", 0), ("b", 30)]

    async def counted(prompts: PromptSet, temperature: float) -> Any:
        async with engine_of(model, **flags) as engine:
            for index, ids in enumerate(prompts.prompts):
                await run(engine, list(ids), max_tokens=20, seed=3 + index, temperature=temperature)
            return engine.metrics.draft_totals()

    for figures in found:
        prompts = next(one for one in SETS if one.name == figures.prompts)
        totals = asyncio.run(counted(prompts, figures.temperature))
        assert figures.rounds == totals.drafts > 5
        assert figures.mean_accepted_length == pytest.approx(totals.mean_acceptance_length)
    assert found[3].mean_accepted_length > 1.2  # hot text meets hot drafts now and then
    known = [("a", 0.0), ("a", 30.0), ("b", 30.0)]
    rest = evaluate_drafter(options, SETS, max_tokens=20, temperatures=(0.0, 30.0), seed=3, known=known)
    assert list(rest) == [found[2]]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({}, "there is no drafter to evaluate: give --draft_model"),
        ({"num_speculative_tokens": 0}, "there is no drafter"),
        (
            {"draft_model": "X", "num_speculative_tokens": 2, "target_verify_width": 0},
            "--target_verify_width=0",
        ),
    ],
)
def test_a_config_without_drafts_is_refused(
    model: Path, flags: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    if "draft_model" in flags:
        flags = {**flags, "draft_model": str(make_mtp(tmp_path / "mtp"))}
    with pytest.raises(ConfigError, match=complaint):
        list(evaluate_drafter(config_of(model, **flags), SETS, max_tokens=4))


def test_confidence_is_calibrated_on_its_raw_word(model: Path, tmp_path: Path) -> None:
    """Whatever table the checkpoint holds already, the fit is of what the head itself says."""
    sizes = Sizes(draft_ids=tuple(range(3, 60)))
    plain, settled = (make_dspark(tmp_path / name, sizes) for name in ("plain", "settled"))
    raw = json.loads((settled / "config.json").read_text())
    columns = {"temperatures": [7.0] * sizes.block, "biases": [-3.0] * sizes.block}
    raw["confidence_calibration"] = {"greedy": columns, "sampled": columns}
    (settled / "config.json").write_text(json.dumps(raw))
    tables = [
        calibrate_dspark(
            config_of(model, enable_probabilistic_draft=True), path, sizes.block, SETS[1],
            max_tokens=20, temperature=3.0, seed=0, progress=silent,
        )
        for path in (plain, settled)
    ]  # fmt: skip
    assert tables[0] == tables[1] and set(tables[0]) == {"greedy", "sampled"}
    for found in tables[0].values():
        assert len(found.temperatures) == sizes.block and 5 * 10 < found.samples[0] <= 5 * 20
        assert sum(found.ece_after) < sum(found.ece_before)


def test_prompt_sets_are_named_and_cut(tmp_path: Path, text: TextAssets) -> None:
    path, prose = tmp_path / "q.txt", tmp_path / "w.txt"
    path.write_text("\n".join(["one", "two", "x" * 400, *map(str, range(10))]))
    prose.write_text("a line of some length to go on with\n")
    options = EvaluationOptions(prompts=(str(path),), text=(str(prose),), limit=4, max_prompt_tokens=40,
                                continue_tokens=3)  # fmt: skip
    sets = read_sets(options, text)
    shown = [text.tokenizer.decode(ids).split("\n")[1] for ids in sets[0].prompts]
    assert [one.name for one in sets] == ["q.txt", "w.txt"] and shown == ["one", "1", "4", "7"]
    assert sets[1].prompts == (tuple(text.tokenizer.encode("a line of some")[:3]),)
    assert pick(list(range(10)), 4) == [0, 2, 5, 7] and pick([1, 2], 4) == [1, 2] and pick([], 4) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "q.txt").write_text("x")
    twice = dataclasses.replace(options, prompts=(str(path), str(tmp_path / "other" / "q.txt")))
    with pytest.raises(
        ConfigError, match=r"--eval_prompts=.*other/q.txt: another file .* is called q.txt too"
    ):
        read_sets(twice, text)
    with pytest.raises(ConfigError, match="holds no prompt of at most --max_prompt_tokens=2"):
        read_sets(dataclasses.replace(options, max_prompt_tokens=2), text)
    with pytest.raises(ConfigError, match="--eval_text=/nowhere cannot be read"):
        read_sets(EvaluationOptions(text=("/nowhere",)), text)


def test_the_figures_file_goes_on_under_the_same_facts_only(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    one = Figures("a.jsonl", 0.0, 4, 80, 30, 1.5, (0.5, None))
    two = dataclasses.replace(one, temperature=1.0, mean_accepted_length=None)
    FiguresFile(path, {"seed": 0}).add(one)
    again = FiguresFile(path, {"seed": 0})
    assert again.figures == [one]
    again.add(two)
    content = json.loads(path.read_text())
    assert content["seed"] == 0 and content["results"][0]["acceptance"] == [0.5, None]
    assert FiguresFile(path, {"seed": 0}).figures == [one, two]
    assert FiguresFile(path, {"seed": 1}).figures == FiguresFile(path, {"seed": 0}, anew=True).figures == []
    path.write_text("{")
    assert FiguresFile(path, {"seed": 0}).figures == []
    assert table([one, two]).splitlines() == [
        "         temperature   rounds  tokens/round  accepted, given those before:",
        "                                                  1     2",
        "a.jsonl            0       30          1.50    0.50     -",
        "a.jsonl            1       30             -    0.50     -",
    ]
