"""Adaptive speculation in whole engines on tiny fp64 models: texts, feedback, traces, nothing left behind.

Costs are made up, so that decisions change all the time and never depend on a clock; one test calibrates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedDrafter
from test_engine import KV_BYTES, engine_of, model, run
from test_lossless_budget import Moody
from test_lossless_named import Reference, _reference, identical, reference, run_all
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_dspark import Sizes, make_dspark, target_config

from xspec.calib.calibrate import Calibrated
from xspec.core.request import FinishReason, SamplingParams
from xspec.core.round import RoundPlan, RowFeedback
from xspec.cost.model import CostTable, Sps
from xspec.cost.settings import ContextInterval
from xspec.engine import build
from xspec.engine.api import TextOutput
from xspec.engine.engine import AsyncEngine
from xspec.exec.slots import Slot
from xspec.platform.base import Event
from xspec.trace import Trace, read_trace, replay

__all__ = ["model", "reference"]  # fixtures

STEPS = 5
CONTROLS = ("draft_step", "target_verify")


def made_up(*parts: Any, **_: Any) -> Calibrated:
    """Costs of some seconds a round, so that no dwell lasts, each depth and size cheapest somewhere.

    KV lengths of 41 to 44, and those above 75, are covered by nothing.
    """
    contexts = tuple(ContextInterval(1, low, high) for low, high in ((1, 15), (16, 28), (29, 40), (45, 75)))
    rng, width = random.Random(5), parts[4].steps
    rows = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96)
    curves = {}
    for context in range(len(contexts)):
        for steps in range(width + 1):
            ms = [1000.0 * rng.uniform(1.0, 3.0) * (1.0 + count / 16) for count in rows]
            curves[context, steps] = Sps(rows, tuple(1000.0 / one for one in ms))
    return Calibrated(CostTable(contexts, curves, (8.0, 22.0, 35.0, 60.0), 0.1), "made up", None)


@dataclass
class Ran:
    """An engine; once it is closed, its trace and what it said of itself in the end."""

    engine: AsyncEngine
    trace: Trace = Trace({}, ())
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[RowFeedback]:
        return [row for entry in self.trace.rounds if entry.feedback for row in entry.feedback.rows]

    @property
    def reasons(self) -> Counter[str]:
        return Counter(entry.plan.reason for entry in self.trace.rounds)


@asynccontextmanager
async def adapting(
    model: Path,
    control: str,
    draft_model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    drafter: ScriptedDrafter | None = None,
    synchronous: bool = True,
    **flags: Any,
) -> AsyncIterator[Ran]:
    """An engine under an adaptive policy; afterwards its books and its trace are checked."""
    monkeypatch.setattr(build, "calibrated_costs", made_up)
    if drafter is not None:
        monkeypatch.setattr(build, "make_drafter", lambda *_: drafter)
    path = folder / "trace.jsonl"
    path.unlink(missing_ok=True)
    values = {
        "draft_model": str(draft_model),
        f"enable_adaptive_{control}": True,
        "round_trace": str(path),
        "num_speculative_tokens": STEPS,
        **flags,
    }
    async with engine_of(model, **values) as engine:
        if not synchronous:
            platform = engine._driver.pipeline._executor._platform
            slow = dataclasses.replace(platform.abilities, synchronous=False)
            monkeypatch.setattr(platform, "abilities", slow)
        ran = Ran(engine)
        yield ran
        while not engine._driver.pipeline.empty:
            await asyncio.sleep(0.001)
        ran.info = engine.server_info()
    ran.trace = read_trace(path)
    check_trace(ran)
    assert replay(engine._policies("adaptive"), ran.trace) == []


def check_trace(ran: Ran) -> None:
    """Feedback tells the truth, and policy and metrics count what the trace holds."""
    told = [entry.feedback for entry in ran.trace.rounds if entry.feedback is not None]
    tiers = ran.engine._scheduler._tiers
    for feedback in told:
        plan, shape = feedback.plan, feedback.shape
        assert sum(row.committed for row in feedback.rows) <= feedback.committed_tokens
        for row in feedback.rows:
            assert 0 <= row.accepted <= row.verified <= row.admitted <= plan.draft_steps
            assert row.verified <= row.proposed <= plan.draft_steps
            assert 1 <= row.committed <= row.admitted + 1
        if shape.target_rows:
            assert sum(row.admitted + 1 for row in feedback.rows) <= shape.target_rows
            width = plan.draft_steps if shape.draft_rows else 0
            lanes = shape.draft_rows or shape.target_rows
            budget = plan.target_rows if width else None
            assert shape.target_rows == tiers.fit(lanes, width, budget)
        if shape.draft_rows:
            assert feedback.signals is not None
            assert feedback.signals.shape == (len(feedback.rows), plan.draft_steps)
        else:
            assert feedback.signals is None
            assert all(row.proposed == row.admitted == 0 for row in feedback.rows)
    decoded = [feedback for feedback in told if feedback.shape.target_rows]
    reasons = Counter(feedback.plan.reason for feedback in decoded)
    says = ran.info["adaptive"]
    assert json.loads(json.dumps(says)) == says
    assert says["decode_batches"] == len(decoded)
    assert says["probes"] == reasons["probe"] == says["measured"]["probes"]
    assert says["uncovered"] == {kind: reasons[f"uncovered_{kind}"] for kind in ("kv", "bucket")}
    if len(told) == len(ran.trace.rounds):  # of lost rounds nobody is told
        assert sum(says["switches"].values()) == sum(says["measured"]["switches"].values())
    share = says["measured"]["admitted_share"]
    assert share is None or 0.0 <= share <= 1.0
    steps = Counter(str(f.plan.draft_steps if f.shape.draft_rows else 0) for f in decoded)
    assert {key: n for key, n in says["measured"]["rounds"].items() if n} == dict(steps)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp(tmp_path_factory.mktemp("mtp") / "mtp")


SCHEDULES: dict[str, dict[str, Any]] = {
    "two slots": {"block_size": 8},
    "tiny chunks": {"max_tokens_per_chunk_for_prefill": 5, "max_tokens_per_batch": 24, "block_size": 4},
    "separate prefill": {"enable_mix_batch": False, "max_tokens_per_chunk_for_prefill": 16},
    "few rows": {"max_seqs_per_batch": 3, "block_size": 8},
    "preempting": {"block_size": 4, "max_seqs_per_batch": 12, "max_cache_size": 40 * 4 * KV_BYTES,
                   "max_model_len": 100, "prefill_scheduling_memory_usage_threshold": 1.0},
    "no padding": {"enable_graph_mode_decode_no_padding": True, "max_seqs_per_batch": 7, "block_size": 1},
}  # fmt: skip


async def check_texts(engine: AsyncEngine, reference: Reference) -> None:
    for _ in range(2):  # from the second time on through a warm prefix cache
        found = await run_all(engine, reference)
        for name, expected in reference.plain.items():
            identical(found[name], expected, name)


@pytest.mark.parametrize(
    ("control", "schedule", "synchronous"),
    [
        *(("draft_step", schedule, True) for schedule in SCHEDULES),
        *(("target_verify", schedule, index % 2 == 0) for index, schedule in enumerate(SCHEDULES)),
    ],
)
async def test_every_text_is_that_of_plain_decoding(
    model: Path,
    reference: Reference,
    mtp: Path,
    control: str,
    schedule: str,
    synchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Moody(reference.scripts, right=0.8)
    args = (model, control, mtp, tmp_path, monkeypatch)
    flags = {"drafter": drafter, "synchronous": synchronous, **SCHEDULES[schedule]}
    async with adapting(*args, **flags) as ran:
        await check_texts(ran.engine, reference)
        if schedule == "preempting":
            assert ran.engine._scheduler.counters.preemptions > 0
    rows = ran.rows
    assert sum(row.accepted for row in rows) > 200
    assert ran.reasons["uncovered_kv"] and ran.reasons["nothing_to_draft"]
    if control == "draft_step":
        assert len({entry.plan.draft_steps for entry in ran.trace.rounds}) >= 3
        assert ran.reasons["switch"] and ran.reasons["probe"]
    else:
        assert len({entry.plan.target_rows for entry in ran.trace.rounds}) >= 4
        assert sum(row.admitted < row.proposed for row in rows) > 20


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers: enough to tap."""
    return make_checkpoint(tmp_path_factory.mktemp("deep") / "llama", "llama", overrides=target_config())


@pytest.fixture(scope="module")
def deep_reference(deep: Path) -> Reference:
    return asyncio.run(_reference(deep))


@pytest.mark.parametrize(
    ("algorithm", "control", "probabilistic", "synchronous"),
    [
        ("MTP", "draft_step", True, True),
        ("MTP", "target_verify", True, False),
        ("DSpark", "target_verify", False, True),
        ("DSpark", "target_verify", True, False),
    ],
)
async def test_real_drafters(
    deep: Path,
    deep_reference: Reference,
    algorithm: str,
    control: str,
    probabilistic: bool,
    synchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if algorithm == "MTP":
        drafter = make_mtp(tmp_path / "drafter")
    else:
        drafter = make_dspark(tmp_path / "drafter", Sizes(block=STEPS))
    flags = {**SCHEDULES["preempting"], "max_cache_size": 40 * 4 * 3 * KV_BYTES}
    flags |= {"enable_probabilistic_draft": probabilistic, "synchronous": synchronous}
    args = (deep, control, drafter, tmp_path, monkeypatch)
    async with adapting(*args, **flags) as ran:
        await check_texts(ran.engine, deep_reference)
        assert ran.engine._scheduler.counters.preemptions > 0
    assert sum(row.proposed for row in ran.rows) > 300


@pytest.mark.parametrize(("control", "synchronous"), [("draft_step", True), ("target_verify", False)])
async def test_aborts_and_lost_rounds(
    model: Path,
    reference: Reference,
    mtp: Path,
    control: str,
    synchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients come and go in a pool that is too small, and the device loses rounds. Who ends well, ends as
    ever; the trace still replays."""
    rng, lose = random.Random(8), {20, 23, 47}  # with the next ones never three in a row: that ends an engine
    flags = {**SCHEDULES["preempting"], "max_seqs_per_batch": 6, "synchronous": synchronous}
    flags["drafter"] = Moody(reference.scripts, right=0.9)
    well = 0
    async with adapting(model, control, mtp, tmp_path, monkeypatch, **flags) as ran:
        lose_rounds(ran.engine, lose, monkeypatch)

        async def visitor() -> None:
            await asyncio.sleep(rng.random() * 0.2)
            prompt, params = reference.cases[rng.choice([*reference.cases])]
            stream = ran.engine.generate(prompt, SamplingParams(**{"max_tokens": 24, "seed": 7, **params}))
            for _ in range(rng.randrange(5)):
                if (await anext(stream)).finish_reason:
                    break
            await stream.aclose()

        async def resident(name: str) -> list[TextOutput]:
            prompt, params = reference.cases[name]
            return await run(ran.engine, prompt, **params)

        for _ in range(3):
            visitors = [asyncio.create_task(visitor()) for _ in range(20)]
            found = await asyncio.gather(*map(resident, reference.cases))
            await asyncio.gather(*visitors)
            for name, outputs in zip(reference.cases, found, strict=True):
                if all(output.finish_reason is not FinishReason.ERROR for output in outputs):
                    identical(outputs, reference.plain[name], name)
                    well += 1
        assert ran.engine._scheduler.counters.preemptions > 0
    lost = {entry.plan.plan_id for entry in ran.trace.rounds if entry.error}
    assert lose <= lost <= {*lose, *(plan_id + 1 for plan_id in lose)}, "the next may need what was lost"
    assert well > 2 * len(reference.cases)


def lose_rounds(engine: AsyncEngine, lose: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine._driver.pipeline._executor
    execute = runner.execute

    def losing(plan: RoundPlan, slot: Slot) -> Event:
        if plan.round_id in lose:
            raise RuntimeError("the round is lost")
        return execute(plan, slot)

    monkeypatch.setattr(runner, "execute", losing)


CALIBRATION = {
    "model": "sps",
    "request_buckets": [1, 4],
    "contexts": [{"prefill_tokens": 9, "min_kv_length": 1, "max_kv_length": 60}],
    "warmup_steps": 1,
    "window_steps": 2,
    "windows_per_point": 1,
}


FIRST = ("every penalty", "sampled", "three choices", "echo", "bias")


async def traced(
    model: Path, reference: Reference, path: Path, **flags: Any
) -> tuple[dict[str, list[TextOutput]], Trace]:
    """Cases alone, one after another, at a fixed width."""
    values = {"max_seqs_per_batch": 4, "num_speculative_tokens": 3, "round_trace": str(path), "block_size": 8}
    async with engine_of(model, **values, enable_prefix_cache=False, **flags) as engine:
        scheduler = engine._scheduler
        assert scheduler.idle and scheduler.pages.available == scheduler.pages.pages
        assert sorted(scheduler._free_rows) == [1, 2, 3, 4] and engine._driver.pipeline.empty
        engine.use_policy("fixed:3")
        found = {}
        for name in FIRST:
            prompt, params = reference.cases[name]
            found[name] = await run(engine, prompt, **params)
    return found, read_trace(path)


@pytest.mark.parametrize("control", CONTROLS)
async def test_calibration_leaves_nothing(
    model: Path,
    reference: Reference,
    mtp: Path,
    control: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "calibration.json"
    wrapped = {"version": 1, "calibration": CALIBRATION}
    config.write_text(json.dumps(wrapped if control == "draft_step" else CALIBRATION))
    flag = "adaptive_draft_step_config" if control == "draft_step" else "adaptive_target_verify_calibration"
    args = (model, reference)
    flags = {"draft_model": str(mtp), f"enable_adaptive_{control}": True}
    measured = await traced(*args, tmp_path / "measured", **flags, **{flag: str(config)})
    with monkeypatch.context() as patched:
        patched.setattr(build, "calibrated_costs", made_up)
        fresh = await traced(*args, tmp_path / "fresh", **flags)
    for name in FIRST:
        identical(measured[0][name], reference.plain[name], name)
    ours, theirs = (trace.rounds for trace in (measured[1], fresh[1]))
    assert len(ours) == len(theirs) > 30
    for one, other in zip(ours, theirs, strict=True):
        assert one.view == other.view
        assert one.feedback is not None and other.feedback is not None
        assert one.feedback.rows == other.feedback.rows
        if other.feedback.signals is None:
            assert one.feedback.signals is None
        else:
            assert one.feedback.signals == pytest.approx(other.feedback.signals, rel=1e-6)
