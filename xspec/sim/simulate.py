"""The engine's loop on a virtual clock: the real scheduler and a policy, against the costs of a table.

Mirrors exec/driver.py and engine/loop.py: submit while the ring has room, else retire the oldest round, so
with two slots the policy plans round n from what rounds up to n-2 said. The host takes no time of its own:
measured costs hold what it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from xspec.core.request import FinishReason, Request, SamplingParams
from xspec.core.round import RoundFeedback, RoundPlan
from xspec.core.sequence import Sequence
from xspec.cost.model import Costs
from xspec.errors import ConfigError
from xspec.policy.base import Policy
from xspec.policy.geometry import PolicyGeometry
from xspec.sched import commit
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler
from xspec.sim.device import Executed, VirtualDevice
from xspec.sim.loads import Arrivals, RequestKey
from xspec.sim.world import SimRequest, World

BLOCK_TOKENS = 32

MakePolicy = Callable[[VirtualDevice], Policy]
"""A fresh policy for one run; only an oracle looks at the device."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of the engine around the device is simulated. `shadow_cost`: what telling all depths adds to a
    round, as a share of its decode part."""

    geometry: PolicyGeometry
    limits: Limits
    slots: int = 2
    shadow_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """One request in one retired decode round."""

    difficulty: str
    verified: int
    committed: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One retired round. `interval_s` ends at `end_s` and belongs to the phase it began in.

    `draftable`: some request had room for a draft, so that drafting was a choice.
    """

    phase: int
    end_s: float
    interval_s: float
    requests: int  # decode rows planned
    draftable: bool
    draft_steps: int
    target_rows: int
    tokens: int  # committed, those of finished prompts included
    prefill_tokens: int
    decode_ms: float
    predicted_ms: float | None
    reason: str
    rows: tuple[Told, ...]
    depth: int | None = None
    shadow: bool = False

    @property
    def probe(self) -> bool:
        """Whether the policy ran it to learn, not because it was thought best."""
        return "probe" in self.reason


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulation. `latencies_s`: seconds from arrival to last token of every request answered."""

    rounds: tuple[RoundRecord, ...]
    latencies_s: tuple[float, ...]


@dataclass(slots=True)
class _InFlight:
    plan: RoundPlan
    draftable: bool
    executed: Executed
    end_s: float


@dataclass(slots=True)
class _Client:
    request: SimRequest
    sequence: Sequence
    arrived_s: float


def simulate(world: World, costs: Costs, engine: EngineShape, make_policy: MakePolicy) -> Run:
    """Run `world` to its end. ConfigError if it does not fit the engine, UncoveredError (a ConfigError) where
    the costs do not cover what is run."""
    return Simulation(world, costs, engine, make_policy).run()


class Simulation:
    def __init__(self, world: World, costs: Costs, engine: EngineShape, make_policy: MakePolicy) -> None:
        self._world = world
        self._arrivals: Arrivals = world.load.arrivals()
        self._ends = [end for _, end in world.load.phases]
        self._device = VirtualDevice(costs, engine.geometry.lanes, engine.shadow_cost)
        self._policy = make_policy(self._device)
        known, drafted = world.population.draft_width, engine.geometry.draft_width
        if known < drafted:
            raise ConfigError(f"{drafted} tokens are drafted, but acceptance is given for {known}")
        seats = engine.limits.max_seqs_per_batch
        most = world.load.most_requests
        if most is not None and most > seats:
            raise ConfigError(f"{most} requests at once; the costs allow {seats}")
        blocks = -(-world.population.most_tokens // BLOCK_TOKENS)
        pages = PageAllocator(seats * blocks, BLOCK_TOKENS, prefix_cache=False)
        self._scheduler = Scheduler(
            pages,
            engine.limits,
            engine.geometry.lanes,
            draft_block=engine.geometry.draft_width,
            tiers=engine.geometry.tiers,
        )
        self._slots = engine.slots
        self._ring: deque[_InFlight] = deque()
        self._clients: dict[int, _Client] = {}  # by sequence id
        self._asking: dict[RequestKey, int] = {}  # sequence ids
        self._next_id = 0
        self._planned = 0
        self._now_s = 0.0
        self._device_free_s = 0.0
        self._steady = False  # whether the last retirement ended right where the coming interval begins
        self._rounds: list[RoundRecord] = []
        self._latencies_s: list[float] = []

    def run(self) -> Run:
        while self._now_s < self._ends[-1]:
            self._depart()
            self._arrive()
            if len(self._ring) < self._slots and self._submit():
                continue
            if self._ring:
                self._retire()
            elif (wake_s := self._arrivals.next_s()) is not None:
                self._now_s, self._steady = wake_s, False
            elif self._clients:
                raise ConfigError(
                    f"{len(self._clients)} requests wait but no round can be planned: without chunked "
                    "prefill a prompt must fit into one batch"
                )
            else:
                break
        return Run(tuple(self._rounds), tuple(self._latencies_s))

    def _depart(self) -> None:
        for key in self._arrivals.leaving(self._now_s):
            sequence_id = self._asking.pop(key)
            client = self._clients.pop(sequence_id)
            self._scheduler.cancel(client.sequence, FinishReason.ABORT)
            self._device.drop(sequence_id)

    def _arrive(self) -> None:
        for key, classes in self._arrivals.due(self._now_s):
            asked = self._world.request(key, classes)
            params = SamplingParams(max_tokens=asked.answer_tokens, temperature=0.0, ignore_eos=True)
            request = Request(str(self._next_id), (0,) * asked.prompt_tokens, params)
            sequence = Sequence(
                id=self._next_id,
                request=request,
                choice=0,
                seed=0,
                max_len=asked.total_tokens,
                stop_ids=frozenset(),
            )
            self._next_id += 1
            self._clients[sequence.id] = _Client(asked, sequence, self._now_s)
            self._asking[key] = sequence.id
            self._device.take(sequence.id, asked)
            self._scheduler.add(sequence)

    def _submit(self) -> bool:
        view = self._scheduler.view(plan_id=self._planned)
        if view is None:
            return False
        plan = self._scheduler.plan(self._policy.plan(view), round_id=self._planned)
        if plan is None:
            return False
        self._planned += 1
        executed = self._device.execute(plan)
        self._device_free_s = max(self._device_free_s, self._now_s) + executed.ms / 1e3
        draftable = any(room > 1 for room in view.rooms)
        self._ring.append(_InFlight(plan, draftable, executed, self._device_free_s))
        return True

    def _retire(self) -> None:
        oldest = self._ring.popleft()
        began_s, self._now_s = self._now_s, oldest.end_s
        retired = commit.retire(self._scheduler, oldest.executed.result)
        interval_s = self._now_s - began_s
        round_ms = interval_s * 1e3 if self._steady else None
        self._steady = True
        feedback = _feedback(oldest, retired, round_ms)
        self._policy.observe(feedback)
        self._record(oldest, feedback, began_s)
        for output in retired.outputs:
            if output.finish_reason is not None:
                self._leave(int(output.request_id))

    def _leave(self, sequence_id: int) -> None:
        client = self._clients.pop(sequence_id)
        self._latencies_s.append(self._now_s - client.arrived_s)
        del self._asking[client.request.key]
        self._arrivals.finished(client.request.key)
        self._device.drop(sequence_id)  # what is in flight was executed: it is planned no more

    def _record(self, round_: _InFlight, feedback: RoundFeedback, began_s: float) -> None:
        plan = round_.plan
        self._rounds.append(
            RoundRecord(
                phase=min(bisect_right(self._ends, began_s), len(self._ends) - 1),
                end_s=self._now_s,
                interval_s=self._now_s - began_s,
                requests=len(plan.batch.rows),
                draftable=round_.draftable,
                draft_steps=plan.spec.draft_steps if plan.batch.verify else 0,
                target_rows=plan.shape.target_rows,
                tokens=feedback.committed_tokens,
                prefill_tokens=plan.shape.prefill_tokens,
                decode_ms=round_.executed.decode_ms,
                predicted_ms=plan.spec.predicted_ms,
                reason=plan.spec.reason,
                rows=tuple(
                    Told(self._difficulty(row.sequence_id), row.verified, row.committed)
                    for row in feedback.rows
                ),
                depth=plan.spec.depth if plan.batch.verify else None,
                shadow=plan.spec.shadow,
            )
        )

    def _difficulty(self, sequence_id: int) -> str:
        return self._clients[sequence_id].request.difficulty


def _feedback(round_: _InFlight, retired: commit.Retired, round_ms: float | None) -> RoundFeedback:
    signals, matches = round_.executed.result.signals, round_.executed.result.matches
    return RoundFeedback(
        plan=round_.plan.spec,
        shape=round_.plan.shape,
        rows=retired.rows,
        round_ms=round_ms,
        prefill_tokens=round_.plan.shape.prefill_tokens,
        committed_tokens=retired.committed_tokens,
        signals=None if signals is None else signals[list(retired.told)],
        matches=None if matches is None else matches[list(retired.told)],
    )
