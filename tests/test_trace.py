"""The round trace: exact values there and back, what it survives, and the replay of a policy over it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from drafting_fake import DraftingDevice
from hypothesis import given
from hypothesis import strategies as st
from paged_fake import InlineLauncher, sequence

import xspec.trace
from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import BucketGrid, RoundShape, TargetTiers
from xspec.errors import ConfigError
from xspec.exec.driver import Driver
from xspec.exec.pipeline import Pipeline
from xspec.policy.base import PolicyView
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.geometry import PolicyGeometry
from xspec.policy.settings import DraftStepSettings
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler
from xspec.trace import (
    Mismatch,
    RoundTrace,
    Trace,
    TracedRound,
    check_trace_file,
    read_trace,
    replay,
)

LEFT = "in flight when the trace ended"


class Learner:
    """A policy whose every decision depends on all that it has seen, bit by bit."""

    name = "learner"

    def __init__(self) -> None:
        self.memory = 0.5

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps = int(self.memory * 1e6 + sum(view.kv_bounds) + view.waiting) % 4
        return SpeculationPlan(view.plan_id, self.name, steps, reason="switch", predicted_ms=self.memory)

    def observe(self, feedback: RoundFeedback) -> None:
        told = [feedback.round_ms or 0.0, *(row.accepted for row in feedback.rows)]
        if feedback.signals is not None:
            told += [float(value) for value in feedback.signals.ravel()]
        for value in told:
            self.memory = math.fmod(self.memory * 1.7 + value, 1.0)

    def status(self) -> dict[str, Any]:
        return {}


def view(plan_id: int, rows: int = 2) -> PolicyView:
    ids = tuple(range(10, 10 + rows))
    return PolicyView(
        plan_id, ids, tuple(7 * i + plan_id for i in ids), 3, 4, ids, (True, False) * (rows // 2)
    )


def feedback(
    plan: SpeculationPlan, round_ms: float | None = 12.25, signals: np.ndarray | None = None
) -> RoundFeedback:
    rows = (RowFeedback(10, 3, 3, 2, 3, True), RowFeedback(11, 3, 1, 1, 1))
    return RoundFeedback(plan, RoundShape(2, 8, 5, 3), rows, round_ms, 5, 4, signals)


def run(
    path: Path, rounds: int, *, lag: int = 2, lost: Sequence[int] = (), unfinished: int = 0
) -> list[SpeculationPlan]:
    """An engine's order of things: `lag` rounds in flight, the policy told of each as it retires."""
    policy, trace, noise = Learner(), RoundTrace(str(path), {"kind": "test"}), np.random.default_rng(1)
    plans: list[SpeculationPlan] = []
    observed = retired = 0

    def retire() -> None:
        nonlocal observed, retired
        plan = plans[retired]
        retired += 1
        if plan.plan_id in lost:
            trace.retired(plan.plan_id, None, RuntimeError("device gone"))
            return
        signals = noise.random((2, 3), dtype=np.float32) if plan.draft_steps else None
        told = feedback(plan, float(noise.random()) if plan.plan_id % 3 else None, signals)
        policy.observe(told)
        observed += 1
        trace.retired(plan.plan_id, told)

    for plan_id in range(rounds):
        if plan_id - retired >= lag:
            retire()
        seen = view(plan_id)
        plans.append(policy.plan(seen))
        trace.planned(seen, plans[-1], observed)
    while retired < rounds - unfinished:
        retire()
    trace.close()
    return plans


# -- there and back -----------------------------------------------------------------------------


def same(one: RoundFeedback | None, other: RoundFeedback | None) -> bool:
    """Equality with arrays compared bit by bit."""
    if one is None or other is None:
        return one is other
    arrays = [told.signals for told in (one, other)]
    if any(array is None for array in arrays):
        alike = arrays == [None, None]
    else:
        first, second = (np.asarray(array) for array in arrays)
        alike = first.shape == second.shape and first.dtype == second.dtype
        alike = alike and first.tobytes() == second.tobytes()
    bare = [
        (told.plan, told.shape, told.rows, told.round_ms, told.prefill_tokens, told.committed_tokens)
        for told in (one, other)
    ]
    return alike and bare[0] == bare[1]


def test_a_round_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    plan = SpeculationPlan(7, "p", 3, 2, None, 24, 1, 0, "switch", 0.1 + 0.2)
    signals = np.array([[0.1, 1 / 3, 1e-45], [1.0, 0.0, -0.0]], dtype=np.float32)
    told = feedback(plan, 1e-9, signals)
    trace = RoundTrace(str(path), {"buckets": [1, 2]})
    trace.planned(view(7), plan, 5)
    trace.retired(7, told)
    trace.close()
    lines = path.read_bytes().splitlines()
    assert orjson.loads(lines[0]) == {
        "format": "xspec round trace", "version": 1, "about": {"buckets": [1, 2]},
    }  # fmt: skip
    assert orjson.loads(lines[1]) == {
        "round": 7,
        "observed": 5,
        "view": {
            "plan_id": 7, "sequence_ids": [10, 11], "kv_bounds": [77, 84], "waiting": 3, "prefill_tokens": 4,
            "rooms": [10, 11], "speculative": [True, False],
        },
        "plan": {
            "plan_id": 7, "policy": "p", "draft_steps": 3, "verify_steps": 2, "depth": None,
            "target_rows": 24, "range_index": 1, "candidate_index": 0, "reason": "switch",
            "predicted_ms": 0.30000000000000004, "shadow": False,
        },
        "feedback": {
            "shape": {"draft_rows": 2, "target_rows": 8, "prefill_tokens": 5, "kv_pages": 3},
            "rows": [
                {"sequence_id": 10, "proposed": 3, "admitted": 3, "verified": 2, "committed": 3,
                 "censored": True},
                {"sequence_id": 11, "proposed": 3, "admitted": 1, "verified": 1, "committed": 1,
                 "censored": False},
            ],
            "round_ms": 1e-9,
            "prefill_tokens": 5,
            "committed_tokens": 4,
            "signals": {
                "shape": [2, 3],
                "values": [0.10000000149011612, 0.3333333432674408, 1.401298464324817e-45, 1.0, 0.0, -0.0],
            },
            "matches": None,
        },
        "error": None,
    }  # fmt: skip
    read = read_trace(path)
    [entry] = read.rounds
    assert (read.about, read.notes) == ({"buckets": [1, 2]}, ())
    assert (entry.view, entry.plan, entry.observed, entry.error) == (view(7), plan, 5, None)
    assert same(entry.feedback, told)


@given(
    st.lists(st.floats(width=32, allow_nan=False), max_size=12),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_float_comes_back_bit_by_bit(values: list[float], round_ms: float) -> None:
    plan = SpeculationPlan(0, "p", 3, predicted_ms=round_ms)
    rows = len(values) // 3
    told = feedback(plan, round_ms, np.array(values[: rows * 3], dtype=np.float32).reshape(rows, 3))
    line = xspec.trace._line(TracedRound(view(0), plan, 0, told))
    entry = xspec.trace._round(orjson.loads(line))
    assert entry.plan == plan and same(entry.feedback, told)


def test_matches_of_a_shadow_round_come_back() -> None:
    plan = SpeculationPlan(0, "p", 2, depth=1, shadow=True)
    matches = np.arange(18).reshape(2, 3, 3) % 5 < 2
    told = replace(feedback(plan, 1.0, None), matches=matches)
    entry = xspec.trace._round(orjson.loads(xspec.trace._line(TracedRound(view(0), plan, 0, told))))
    assert entry.plan == plan and entry.feedback is not None
    assert entry.feedback.matches is not None and entry.feedback.matches.dtype == bool
    assert np.array_equal(entry.feedback.matches, matches)


def test_signals_that_are_not_finite_come_back_too() -> None:
    plan = SpeculationPlan(0, "p", 3)
    signals = np.array([[np.inf, -np.inf, np.nan], [0.5, 0.25, 0.125]], dtype=np.float32)
    entry = xspec.trace._round(
        orjson.loads(xspec.trace._line(TracedRound(view(0), plan, 0, feedback(plan, None, signals))))
    )
    assert entry.feedback is not None and entry.feedback.signals is not None
    assert np.array_equal(entry.feedback.signals, signals, equal_nan=True)


def test_plain_ints_are_not_asked_of_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "t"
    trace = RoundTrace(str(path))
    trace.planned(view(0), SpeculationPlan(0, "p", np.int64(2), predicted_ms=np.float64(0.1)), 0)
    trace.close()
    [entry] = read_trace(path).rounds
    assert entry.plan == SpeculationPlan(0, "p", 2, predicted_ms=0.1)


def test_rounds_without_feedback_say_why(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run(path, 4, lost=[1], unfinished=1)
    entries = read_trace(path).rounds
    assert [entry.error for entry in entries] == [None, "RuntimeError: device gone", None, LEFT]
    assert [entry.feedback is None for entry in entries] == [False, True, False, True]
    assert [entry.observed for entry in entries] == [0, 0, 1, 1]


def test_rounds_retire_in_the_order_of_their_plans(tmp_path: Path) -> None:
    trace = RoundTrace(str(tmp_path / "t"))
    for plan_id in (0, 1):
        trace.planned(view(plan_id), SpeculationPlan(plan_id, "p", 0), 0)
    with pytest.raises(ValueError, match="round 1 retired before round 0"):
        trace.retired(1, None)
    trace.close()


# -- the file -----------------------------------------------------------------------------------


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("precious")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    refused = {
        there: "exists already; allowed: a file that does not exist yet",
        tmp_path: "exists already; allowed: a file that does not exist yet",
        dangling: "exists already; allowed: a file that does not exist yet",
        tmp_path / "no" / "t": f"there is no folder {tmp_path / 'no'}; make it first",
        there / "t": f"there is no folder {there}; make it first",
    }
    for path, why in refused.items():
        for attempt in (check_trace_file, RoundTrace):
            with pytest.raises(ConfigError) as caught:
                attempt(str(path))
            assert str(caught.value) == f"--round_trace={path}: {why}"
    for path in (f"{tmp_path}/{'x' * 300}", "~no-such-user-here/t"):
        with pytest.raises(ConfigError, match="--round_trace=.*cannot be written"):
            RoundTrace(path)
    assert there.read_text() == "precious" and not (tmp_path / "nowhere").exists()
    check_trace_file(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists(), "only looked at"


def test_the_writer_keeps_up_without_being_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xspec.trace, "_GATHER_S", 0.0)
    path = tmp_path / "t"
    written = threading.Event()
    real = RoundTrace._drain

    def drain(self: RoundTrace) -> None:
        waiting = len(self._waiting)
        real(self)
        if waiting:
            written.set()

    monkeypatch.setattr(RoundTrace, "_drain", drain)
    trace = RoundTrace(str(path))
    trace.planned(view(0), SpeculationPlan(0, "p", 0), 0)
    trace.retired(0, None)
    assert written.wait(20)
    assert len(read_trace(path).rounds) == 1
    trace.close()
    trace.close()
    assert not trace._thread.is_alive()


class FullDisk:
    """A file that takes `writes` writes, then has no room."""

    def __init__(self, path: Path, writes: int) -> None:
        self._file = path.open("xb")
        self._writes = writes

    def write(self, data: bytes) -> int:
        self._writes -= 1
        if self._writes < 0:
            raise OSError(28, "No space left on device")
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_full_disk_ends_the_trace_and_nothing_else(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(xspec.trace, "open", lambda path, mode: FullDisk(path, writes), raising=False)
    path = tmp_path / "t"
    with caplog.at_level(logging.ERROR, "xspec.trace"):
        run(path, 50)
    assert [record.message for record in caplog.records] == [
        f"--round_trace={path}: the trace ends here: [Errno 28] No space left on device"
    ]
    assert path.read_bytes().count(b"\n") == writes


def test_a_disk_that_hangs_ends_the_trace_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(xspec.trace, "_MAX_WAITING_ROUNDS", 10)
    goes_on = threading.Event()
    monkeypatch.setattr(RoundTrace, "_drain", lambda self: goes_on.wait(20))
    trace = RoundTrace(str(tmp_path / "t"))
    with caplog.at_level(logging.ERROR, "xspec.trace"):
        for plan_id in range(30):
            trace.planned(view(plan_id), SpeculationPlan(plan_id, "p", 0), 0)
            trace.retired(plan_id, None)
    assert len(trace._waiting) == 10
    assert [record.message.rsplit(": ")[-1] for record in caplog.records] == [
        "the disk is too slow; the trace ends here"
    ]
    goes_on.set()
    trace.close()


async def test_tracing_blocks_no_event_loop(tmp_path: Path, loop_guard: None) -> None:
    trace = await asyncio.to_thread(RoundTrace, str(tmp_path / "t"))
    for plan_id in range(300):
        trace.planned(view(plan_id), SpeculationPlan(plan_id, "p", 0), 0)
        trace.retired(plan_id, feedback(SpeculationPlan(plan_id, "p", 0)))
    await asyncio.to_thread(trace.close)
    read = await asyncio.to_thread(read_trace, tmp_path / "t")
    assert len(read.rounds) == 300


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t"
    run(path, 5)
    whole = path.read_bytes()
    assert read_trace(path).notes == ()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, 2, last // 2, last - 1):
        path.write_bytes(whole[:-cut])
        read = read_trace(path)
        assert len(read.rounds) == 4
        assert read.notes == ("the last line was cut short and is left out",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the first line is not that of a round trace"),
        (b"\n", "the first line is not that of a round trace"),
        (b'{"format":"xspec round', "the first line is not that of a round trace"),
        (b"[1]\n", "the first line is not that of a round trace"),
        (b"\xff\xfe\n", "the first line is not that of a round trace"),
        (b'{"format":"xspec round trace","version":2}\n', "version 2; allowed: 1"),
        (b'{"format":"xspec round trace","version":1}\n{}\n', "line 2: KeyError('view')"),
        (b'{"format":"xspec round trace","version":1}\n\n', "line 2: JSONDecodeError"),
        (b'{"format":"xspec round trace","version":1}\n[]\n', "line 2: TypeError"),
        (b'{"format":"xspec round trace","version":1}\n{"view":3}\n', "line 2: AttributeError"),
        (b'{"format":"xspec round trace","version":1}\n{"view":{"x":1},"plan":{}}\n', "line 2: TypeError"),
    ],
)
def test_what_is_no_trace_is_refused(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_an_absent_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent")


# -- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("lost", [(), (0, 1), (3, 17, 18)])
def test_a_fresh_policy_decides_the_same_again(lag: int, lost: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "t"
    plans = run(path, 40, lag=lag, lost=lost, unfinished=1)
    read = read_trace(path)
    assert [entry.plan for entry in read.rounds] == plans
    assert len({plan.predicted_ms for plan in plans}) > 20, "the decisions depend on what was observed"
    assert replay(Learner(), read) == []


def test_replay_finds_the_decision_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "t"
    plans = run(path, 12)
    read = read_trace(path)
    rounds = list(read.rounds)
    forged = SpeculationPlan(5, "learner", 99)
    old = rounds[5]
    rounds[5] = TracedRound(old.view, forged, old.observed, old.feedback)
    assert replay(Learner(), Trace({}, tuple(rounds))) == [Mismatch(forged, plans[5])]


def test_one_bit_of_one_signal_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "t"
    run(path, 12)
    read = read_trace(path)
    index, entry = next(
        (i, e) for i, e in enumerate(read.rounds) if e.feedback and e.feedback.signals is not None
    )
    assert entry.feedback is not None and entry.feedback.signals is not None
    entry.feedback.signals[0, 0] = np.nextafter(entry.feedback.signals[0, 0], np.float32(2))
    differing = [mismatch.recorded.plan_id for mismatch in replay(Learner(), read)]
    first = next(i for i, e in enumerate(read.rounds) if e.observed > index)
    assert differing and min(differing) >= first


def test_a_trace_of_several_policies_or_out_of_order_is_refused(tmp_path: Path) -> None:
    told = TracedRound(
        view(0), SpeculationPlan(0, "learner", 0), 0, feedback(SpeculationPlan(0, "learner", 0))
    )
    other = TracedRound(view(1), SpeculationPlan(1, "fixed", 0), 1, None, LEFT)
    with pytest.raises(ConfigError, match="fixed planned rounds of it; allowed: learner"):
        replay(Learner(), Trace({}, (told, other)))
    for observed in (-1, 2):
        wrong = TracedRound(view(1), SpeculationPlan(1, "learner", 0), observed, None, LEFT)
        with pytest.raises(ConfigError, match=f"planned after {observed} observed rounds"):
            replay(Learner(), Trace({}, (told, wrong)))


# -- a real policy in a real driver -------------------------------------------------------------


class Costs:
    """A plain round takes 10 ms; each row beyond the first and each draft step add to it."""

    prefill_ms_per_token = 0.1

    def at(self, kv_lengths: Sequence[int]) -> Costs | None:
        return None if max(kv_lengths) > 70 else self

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        return 10.0 + 0.4 * (target_rows - 1) + 1.5 * draft_steps


def adaptive_policy(lanes: BucketGrid, window_size: int = 20) -> DraftStepPolicy:
    geometry = PolicyGeometry(lanes, TargetTiers(), 4, "full_width")
    return DraftStepPolicy(Costs(), geometry, DraftStepSettings(window_size=window_size))


def agreed(sequence_id: int, round_id: int) -> int:
    """Easy texts first, hard ones later: depths must follow."""
    return (sequence_id + round_id) % (5 if round_id < 60 else 2)


def test_every_decision_of_an_adaptive_engine_is_reproduced(tmp_path: Path) -> None:
    path, lanes = tmp_path / "t", BucketGrid.graph(8)
    limits = Limits(max_tokens_per_batch=64, max_seqs_per_batch=8, max_tokens_per_chunk=16)
    scheduler = Scheduler(PageAllocator(400, 4), limits, lanes)
    trace = RoundTrace(str(path))
    device = DraftingDevice(4, agree=agreed, fail_rounds={30, 31})
    pipeline = Pipeline(device, InlineLauncher(), 2)
    driver = Driver(
        scheduler, adaptive_policy(lanes), pipeline, lambda: len(device.rounds) / 90, witness=trace
    )
    waiting = [sequence(i, [i, 2, 3, 4, 5], max_tokens=9 + 11 * (i % 7)) for i in range(1, 33)]
    while waiting or not pipeline.empty or not scheduler.idle:
        if waiting and len(scheduler.live) < (8 if len(device.rounds) % 40 < 20 else 2):
            scheduler.add(waiting.pop())
        if pipeline.full or not driver.step():
            driver.retire()
    trace.close()

    read = read_trace(path)
    assert [entry.plan.plan_id for entry in read.rounds] == list(range(len(device.rounds)))
    assert [entry.plan for entry in read.rounds] == [plan.spec for plan in device.rounds]
    assert [i for i, entry in enumerate(read.rounds) if entry.error] == [30, 31]
    assert {"initial", "hold", "switch", "probe", "uncovered_kv"} <= {e.plan.reason for e in read.rounds}
    assert replay(adaptive_policy(lanes), read) == []
    assert replay(adaptive_policy(lanes, window_size=200), read) != []
