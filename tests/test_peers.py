"""The comparison with other engines: closed loop, protocol, processes, setups, and what is made of turns."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_fake import CountingEngine, FakePeer
from tiny import make_checkpoint

from benchmarks.peers import run
from benchmarks.peers.child import Child, PeerError
from benchmarks.peers.drivers.llamacpp_driver import BATCH_TOKENS, LlamaPeer
from benchmarks.peers.drivers.protocol import (
    Answer,
    Job,
    Turn,
    closed_loop,
    decode_turn,
    encode_turn,
    options_of,
    parse_job,
    serve,
)
from benchmarks.peers.drivers.transformers_driver import cut
from benchmarks.peers.drivers.vllm_driver import OPTIONS, settle_environment
from benchmarks.peers.drivers.xspec_driver import XspecPeer, flags_of
from benchmarks.peers.setups import (
    KINDS,
    NAMED,
    Limits,
    Places,
    Setup,
    command,
    environment,
    load_options,
    parse_setup,
    parse_setups,
)
from benchmarks.peers.turns import Sample, Spread, prompts_of, ratio, rotated, same_answers, speeds, table
from xspec.config import Config
from xspec.errors import ConfigError

FAKE = Path(__file__).with_name("peer_fake.py")


# -- the closed loop ---------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_every_step_has_all_its_places_taken(lengths: list[int], data: st.DataObject) -> None:
    concurrency = data.draw(st.integers(1, len(lengths)))
    cap = data.draw(st.integers(1, 9))
    engine, clock = CountingEngine(), iter(range(100, 200))
    turn = closed_loop(engine, Job(tuple((7, n) for n in lengths), concurrency, cap), lambda: next(clock))
    assert set(engine.in_flight) == {concurrency}
    assert engine.begun == list(range(len(lengths)))  # the last place is only left free once none waits
    finished = {number for number, answer in enumerate(turn.answers) if answer.finished}
    assert set(engine.dropped) == set(range(len(lengths))) - finished and len(engine.dropped) < concurrency
    for number, answer in enumerate(turn.answers):
        full = min(lengths[number], cap)
        assert answer.tokens == list(range(1, len(answer.tokens) + 1)) and len(answer.tokens) <= full
        assert answer.finished == (len(answer.tokens) == full)
    tokens = sum(len(answer.tokens) for answer in turn.answers)
    assert tokens == concurrency * len(engine.in_flight) and turn.seconds == 1 and not engine.flying


def test_the_clock_stops_when_a_place_stays_free() -> None:
    turn = closed_loop(CountingEngine(), Job(((2,), (5,), (4,)), concurrency=2, max_tokens=9))
    assert [len(answer.tokens) for answer in turn.answers] == [2, 5, 3]
    assert [answer.finished for answer in turn.answers] == [True, True, False]


# -- the protocol ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "concurrency", "max_tokens", "message"),
    [
        ([[1]], 2, 8, "2 requests in flight need as many prompts, got 1"),
        ([[1]], 0, 8, "at least 1"),
        ([[1]], 1, 0, "at least 1"),
        ([[1], []], 1, 8, "not empty"),
    ],
)
def test_jobs_that_are_refused(
    prompts: list[list[int]], concurrency: int, max_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_job({"prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens})


def test_a_turn_goes_over_the_wire() -> None:
    turn = Turn(1.5, (Answer([3, 4], True), Answer([], False)))
    assert decode_turn(json.loads(json.dumps(encode_turn(turn)))) == turn


def spoken(*messages: Mapping[str, Any]) -> list[dict[str, Any]]:
    replies = io.StringIO()
    serve(FakePeer, io.StringIO("".join(json.dumps(message) + "\n" for message in messages)), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


RUN: Mapping[str, Any] = {"command": "run", "prompts": [[1, 2], [1, 1]], "concurrency": 1, "max_tokens": 8}


def test_a_driver_answers_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    early, failed, loaded, ran, unknown = spoken(
        RUN,
        {"command": "load", "options": {"fail": "load"}},
        {"command": "load", "options": {}},
        RUN,
        {"command": "sing"},
    )
    assert "allowed: load, then run" in early["error"] and "'sing'" in unknown["error"]
    assert failed == {"error": "ValueError: no such model"} and "Traceback" in capsys.readouterr().err
    assert loaded == {"about": {"pid": str(os.getpid())}}
    assert decode_turn(ran) == Turn(1.0, (Answer([1, 2], True), Answer([1], True)))


# -- drivers -----------------------------------------------------------------------------------


def test_padding_after_the_end_of_an_answer_does_not_count() -> None:
    assert cut([5, 6, 2, 2, 2], frozenset({2})) == [5, 6, 2]
    assert cut([5, 6], frozenset({2})) == [5, 6]


class FakeLlama:
    """llama.cpp's calls around a model whose next token is (the sum of its sequence + its length) mod 50."""

    def __init__(self) -> None:
        self.cache: dict[int, list[int]] = {}
        self.rows: list[int] = []  # tokens of each call
        self._logits = np.zeros((0, 50), np.float32)

    def llama_decode(self, context: object, batch: SimpleNamespace) -> int:
        found = []
        for row in range(batch.n_tokens):
            cache = self.cache.setdefault(batch.seq_id[row][0], [])
            assert batch.pos[row] == len(cache) and batch.n_seq_id[row] == 1
            cache.append(batch.token[row])
            if batch.logits[row]:
                found.append(np.eye(50, dtype=np.float32)[next_of(cache)])
        self.rows.append(batch.n_tokens)
        self._logits = np.array(found, np.float32)
        return 0

    def llama_get_logits(self, context: object) -> Any:
        return self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_vocab_is_eog(self, vocab: object, token: int) -> bool:
        return token == 0

    def llama_get_memory(self, context: object) -> None:
        return None

    def llama_memory_seq_rm(self, memory: None, place: int, first: int, last: int) -> None:
        assert (first, last) == (-1, -1)
        self.cache.pop(place, None)


def next_of(tokens: Sequence[int]) -> int:
    return (sum(tokens) + len(tokens)) % 50


def llama_peer(lib: FakeLlama, places: int) -> LlamaPeer:
    peer = LlamaPeer.__new__(LlamaPeer)
    size = BATCH_TOKENS
    batch = SimpleNamespace(
        n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size, logits=[0] * size,
        seq_id=[[0] for _ in range(size)],
    )  # fmt: skip
    peer._numpy, peer._lib, peer._batch, peer._vocab_size = np, lib, batch, 50
    peer._context = peer._vocab = None
    peer._places = [None] * places
    return peer


def test_llama_batches_are_those_of_each_request_alone() -> None:
    prompts = [list(range(n, 2 * n)) for n in (3, 7, 1500, 2, 11, 900)]
    lib = FakeLlama()
    turn = llama_peer(lib, 3).run(Job(tuple(map(tuple, prompts)), 3, 20))
    assert not lib.cache and max(lib.rows) <= BATCH_TOKENS and sum(lib.rows) > 1500 + 900
    assert sum(answer.finished for answer in turn.answers) >= 4
    for prompt, answer in zip(prompts, turn.answers, strict=True):
        tokens = list(prompt)
        for token in answer.tokens:
            assert token == next_of(tokens)
            tokens.append(token)
        assert answer.finished == (len(answer.tokens) == 20 or answer.tokens[-1:] == [0])


def test_a_prompt_longer_than_a_batch_is_computed_in_parts() -> None:
    prompt = tuple(number % 50 for number in range(BATCH_TOKENS + 10))
    lib = FakeLlama()
    turn = llama_peer(lib, 1).run(Job((prompt,), 1, 1))
    assert lib.rows == [BATCH_TOKENS, 10] and turn.answers == (Answer([next_of(prompt)], True),)


def test_how_vllm_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 2}, raising=False)
    settle_environment({**OPTIONS, "threads": 2})
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,2" and os.environ["OMP_NUM_THREADS"] == "2"
    assert "GOMP_SPINCOUNT" not in os.environ and "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    settle_environment({**OPTIONS, "bind": "auto", "spin": 7, "processes": 1})
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "auto" and os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    with pytest.raises(ValueError, match="threads 4: this process may use 3 cores"):
        settle_environment({**OPTIONS, "threads": 4})
    with pytest.raises(ValueError, match="processes 2: allowed: 1, 3"):
        settle_environment({**OPTIONS, "processes": 2})


def test_an_option_of_no_driver_is_refused() -> None:
    with pytest.raises(ValueError, match="option spins: unknown; allowed: .*spin, threads"):
        options_of({"spins": 3}, OPTIONS)


# -- processes ---------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Child, dict[str, Any]]]]:
    children: list[Child] = []

    def begin(**options: Any) -> tuple[Child, dict[str, Any]]:
        child = Child("fake", [sys.executable, str(FAKE)], environment(1), tmp_path / "fake.log")
        children.append(child)
        return child, child.ask({"command": "load", "options": options}, 60)

    yield begin
    for child in children:
        child.close()


def state_of(pid: str) -> str:
    """One letter, as /proc has it; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(pid: str, *wanted: str) -> bool:
    deadline_s = time.monotonic() + 20
    while state_of(pid) not in wanted and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return state_of(pid) in wanted


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_what_a_library_prints_is_no_reply(start: Callable[..., tuple[Child, dict[str, Any]]]) -> None:
    child, _ = start(noise=True)
    assert decode_turn(child.ask(RUN, 60)).answers[0].tokens == [1, 2]


@linux_only
def test_a_pause_stops_all_that_the_driver_started(
    start: Callable[..., tuple[Child, dict[str, Any]]],
) -> None:
    child, reply = start(helper=True)
    driver, helper = reply["about"]["pid"], reply["about"]["helper"]
    child.pause()
    assert becomes(driver, "T") and becomes(helper, "T")
    child.resume()
    assert becomes(driver, "S") and becomes(helper, "S")
    assert child.ask(RUN, 60)["seconds"] == 1.0
    child.pause()
    child.close()  # of a stopped one
    assert state_of(driver) == "" and becomes(helper, "", "Z")


def test_errors_of_a_driver_name_its_log(
    start: Callable[..., tuple[Child, dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match=r"^fake: ValueError: no such model \(log: .*fake.log\)$"):
        start(fail="load")
    with pytest.raises(PeerError, match=r"(?s)fake: the driver ended early; .*fake.log ends:.*last words"):
        start(fail="exit")
    with pytest.raises(PeerError, match=r"cannot be started: .*nowhere"):
        Child("fake", [str(tmp_path / "nowhere")], {}, tmp_path / "x.log")


def test_an_answer_is_not_waited_for_endlessly(start: Callable[..., tuple[Child, dict[str, Any]]]) -> None:
    child, _ = start()
    child.pause()
    with pytest.raises(PeerError, match=r"fake: no answer within 0.05 s"):
        child.ask(RUN, 0.05)


# -- setups ------------------------------------------------------------------------------------


def test_setups_as_they_are_written() -> None:
    own = parse_setup("mine=xspec:num_speculative_tokens=3,dtype=float32,x=0.5,graph=false")
    options = {"num_speculative_tokens": 3, "dtype": "float32", "x": 0.5, "graph": False}
    assert own == Setup("mine", "xspec", options)
    assert parse_setup("v=vllm") == Setup("v", "vllm")
    named = parse_setups(["xspec-plain,vllm", "a=vllm:bind=auto,spin=5", "hf"])
    assert [setup.name for setup in named] == ["xspec-plain", "vllm", "a", "hf"]
    assert named[2].options == {"bind": "auto", "spin": 5}
    assert {setup.kind for setup in NAMED.values()} == set(KINDS)


@pytest.mark.parametrize(
    "texts", [["sglang"], ["a=sglang"], ["=vllm"], ["a=vllm:spin"], ["a=vllm:=3"], ["vllm", "vllm"], [""]]
)
def test_setups_that_are_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--config"):
        parse_setups(texts)


LIMITS = Limits(threads=2, concurrency=8, max_model_len=512)


def test_what_a_driver_is_told(tmp_path: Path) -> None:
    gguf, python = tmp_path / "model.gguf", tmp_path / "vllm" / "bin" / "python"
    places = Places(tmp_path, str(gguf), tmp_path / "hf", tmp_path / "ov", tmp_path / "tables")
    with pytest.raises(ConfigError, match=r"vllm: there is no .*python; .*README.md"):
        command(NAMED["vllm"], places)
    with pytest.raises(ConfigError, match=r"vllm: there is no .*hf; .*README.md"):
        load_options(NAMED["vllm"], places, LIMITS)
    for folder in ("hf", "ov", "vllm/bin"):
        (tmp_path / folder).mkdir(parents=True)
    python.touch()
    gguf.touch()
    assert command(NAMED["vllm"], places) == [str(python), "-m", "benchmarks.peers.drivers.vllm_driver"]
    assert command(NAMED["xspec-plain"], places)[0] == sys.executable
    common = {"threads": 2, "concurrency": 8, "max_model_len": 512}
    assert load_options(NAMED["vllm-ngram"], places, LIMITS) == common | {
        "model": str(tmp_path / "hf"),
        "ngram": 4,
    }
    assert load_options(NAMED["llamacpp"], places, LIMITS)["model"] == str(gguf)
    assert load_options(NAMED["openvino"], places, LIMITS)["model"] == str(tmp_path / "ov")
    plain = load_options(NAMED["xspec-plain"], places, LIMITS)
    assert plain["tables"] == str(tmp_path / "tables") and plain["num_speculative_tokens"] == 0
    elsewhere = Places(tmp_path, "", places.hf, places.openvino, places.tables, {"vllm": sys.executable})
    assert command(NAMED["vllm"], elsewhere)[0] == sys.executable
    # the embedded model's drafters come with the empty name
    assert load_options(NAMED["xspec-plain"], elsewhere, LIMITS)["model"] == ""


def test_flags_of_xspec(tmp_path: Path) -> None:
    places = Places(tmp_path, "", tmp_path, tmp_path, tmp_path / "tables")
    plain = flags_of(load_options(NAMED["xspec-plain"], places, LIMITS))
    config = Config.from_mapping(plain)
    assert config.scheduler.max_seqs_per_batch == 8 and config.execution.num_compute_threads == 2
    assert not config.cache.enable_prefix_cache and config.speculation.num_speculative_tokens == 0
    options = load_options(NAMED["xspec-adaptive"], places, LIMITS)
    first = flags_of(options)
    table_path = Path(first["adaptive_draft_step_cost_table_output"])
    assert table_path.parent == tmp_path / "tables" and "adaptive_draft_step_cost_table" not in first
    table_path.touch()
    second = flags_of(options)
    assert second["adaptive_draft_step_cost_table"] == str(table_path)
    assert "adaptive_draft_step_cost_table_output" not in second
    Config.from_mapping(second)
    other = flags_of({**options, "dtype": "float32"})  # other costs
    assert other["adaptive_draft_step_cost_table_output"] != str(table_path)


def test_xspec_as_a_peer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", "llama")
    options = {"model": str(model), "threads": 1, "concurrency": 2, "max_model_len": 64, "tables": ""}
    flags = flags_of({**options, "dtype": "float32"}) | {"max_cache_size": 2**24}
    peer = XspecPeer(flags)
    try:
        prompts = ((5, 6, 7), (8, 9), (10, 11, 12, 13), (14, 15))
        alone = peer.run(Job(prompts, 1, 6))
        assert all(answer.finished and 1 <= len(answer.tokens) <= 6 for answer in alone.answers)
        both = peer.run(Job(prompts, 2, 6))
        for ours, theirs in zip(both.answers, alone.answers, strict=True):
            assert ours.tokens == theirs.tokens[: len(ours.tokens)]
            assert ours.finished <= (ours.tokens == theirs.tokens)
        assert sum(answer.finished for answer in both.answers) >= 3
        assert both.seconds > 0
        with pytest.raises(Exception, match="token"):
            peer.run(Job(((10**6,),), 1, 6))
    finally:
        peer.close()


# -- turns -------------------------------------------------------------------------------------


def test_each_round_begins_with_the_next_one() -> None:
    assert ["".join(rotated("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_each_turn_has_prompts_of_its_own() -> None:
    assert prompts_of(0, 2, "abcde") == ["a", "b"]
    assert prompts_of(2, 2, "abcde") == ["e", "a"]
    assert prompts_of(1, 7, "abc") == list("bcabcab")


def sample(name: str, number: int, seconds: float, *lengths: int, level: int = 1, last: int = 0) -> Sample:
    """A turn whose answers have these lengths and end with `last`; the empty ones are unfinished."""
    answers = (Answer([1] * (n - 1) + [last], True) if n else Answer([], False) for n in lengths)
    return Sample(name, level, number, Turn(seconds, tuple(answers)))


SAMPLES = [
    sample("a", 0, 2.0, 10, 10),
    sample("b", 0, 1.0, 10, 10, last=5),
    sample("b", 1, 2.0, 10, 10),
    sample("a", 1, 2.0, 20, 0),
    sample("a", 2, 1.0, 30, 30),
    sample("b", 2, 1.0, 30, 0),
    sample("a", 0, 1.0, 99, level=8),
]


def test_speeds_and_ratios_are_paired_by_round() -> None:
    assert speeds(SAMPLES, "a", 1) == [10.0, 10.0, 60.0] and speeds(SAMPLES, "b", 1) == [20.0, 10.0, 30.0]
    assert ratio(SAMPLES, "b", "a", 1) == Spread(1.0, 0.5, 2.0)
    assert ratio(SAMPLES, "a", "a", 1) == Spread(1.0, 1.0, 1.0)
    assert ratio(SAMPLES, "b", "a", 8) is None  # b has had no turn there


def test_only_answers_that_both_finished_are_compared() -> None:
    # round 0: two of two differ; round 1: the first differs in length; round 2: the first is the same
    assert same_answers(SAMPLES, "b", "a", 1) == 1 / 4
    assert same_answers(SAMPLES, "a", "a", 1) == 1.0
    assert same_answers(SAMPLES, "b", "a", 8) is None


def test_the_table() -> None:
    lines = table(SAMPLES, ["a", "b"], ["a"], 1).splitlines()
    assert lines[0].split() == ["tokens/s", "low", "high", "rounds", "x", "a", "same", "text"]
    assert lines[1].split() == ["a", "10.0", "10.0", "60.0", "3", "1.00", "(1.00", "..", "1.00)", "100%"]
    assert lines[2].split() == ["b", "20.0", "10.0", "30.0", "3", "1.00", "(0.50", "..", "2.00)", "25%"]
    assert len({len(line) for line in lines}) == 1
    assert "b" not in table(SAMPLES, ["a", "b"], ["a"], 8).splitlines()[-1]


# -- the whole run -----------------------------------------------------------------------------


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`main` with fakes for engines, whose names and options are those of the setups; their journal."""
    journal = tmp_path / "journal"

    def options(setup: Setup, places: Places, limits: Limits) -> dict[str, Any]:
        return {"name": setup.name, "journal": str(journal), **setup.options}

    monkeypatch.setattr(run, "command", lambda setup, places: [sys.executable, str(FAKE)])
    monkeypatch.setattr(run, "load_options", options)
    monkeypatch.setattr(run, "prompt_ids", lambda args: [[number, 4] for number in range(100)])
    return journal


def start_run(tmp_path: Path, *words: str) -> int:
    more = ["--settle_s=0", f"--logs={tmp_path / 'logs'}", f"--output={tmp_path / 'result.json'}"]
    return run.main(run.arguments([*words, *more]))


def test_engines_take_turns_on_the_same_prompts(
    fakes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config=a=xspec:seconds=0.5", "--config=b=vllm:seconds=2.0", "--concurrency=1,2", "--rounds=2"]
    assert start_run(tmp_path, *words, "--max_tokens=3", "--warmup_tokens=2", "--num_prompts=3") == 0
    warm_1, warm_2 = "1 2 [0, 1]", "2 2 [0, 1, 2, 3]"
    turns_1 = ["1 3 [3, 4, 5]", "1 3 [6, 7, 8]"]
    turns_2 = ["2 3 [6, 7, 8, 9, 10, 11]", "2 3 [12, 13, 14, 15, 16, 17]"]
    assert fakes.read_text().splitlines() == [
        f"a {warm_1}", f"b {warm_1}",
        f"a {turns_1[0]}", f"b {turns_1[0]}", f"b {turns_1[1]}", f"a {turns_1[1]}",
        f"a {warm_2}", f"b {warm_2}",
        f"a {turns_2[0]}", f"b {turns_2[0]}", f"b {turns_2[1]}", f"a {turns_2[1]}",
        "a closed", "b closed",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert re.search(r"concurrency 1, answers of at most 3 tokens\n.* x b +same text\n", printed)
    assert re.search(r"\na +18\.0 .* 4\.00 \(4\.00 \.\. 4\.00\) +100%\nb +4\.5 ", printed)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [turn["name"] for turn in result["turns"]] == ["a", "b", "b", "a"] * 2
    assert result["turns"][0]["tokens"] == 9 and result["turns"][0]["tokens_per_s"] == 18.0
    assert set(result["engines"]) == {"a", "b"} and result["engines"]["a"]["load_s"] > 0
    assert result["settings"]["concurrency"] == [1, 2]


def test_a_failing_engine_ends_the_run_and_all_engines(fakes: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^b: RuntimeError: out of memory \(log: .*b.log\)$"):
        start_run(tmp_path, "--config=a=xspec", "--config=b=vllm:fail=run", "--num_prompts=3")
    assert fakes.read_text().splitlines()[-2:] == ["a closed", "b closed"]
    assert not (tmp_path / "result.json").exists()


def test_a_base_that_is_not_in_the_run_is_refused(fakes: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--over c: allowed: a configuration of this run"):
        start_run(tmp_path, "--config=a=xspec", "--over=c")
    assert not fakes.exists()
