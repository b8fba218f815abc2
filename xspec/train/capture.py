"""Hidden states of prompts and answers, taken from the engine by a drafter that only listens.

Every sequence runs through the target once more as a prompt, so that serving and training see the same
numbers. Knows nothing about how the answers came about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from xspec.core.request import NO_NOISE_BELOW
from xspec.core.round import PADDING_ROW
from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, Published
from xspec.errors import EngineError
from xspec.models.base import Target
from xspec.progress import Progress
from xspec.train.dataset import Captured, Writer
from xspec.train.journal import Journal
from xspec.train.offline import Ask, OfflineEngine

SEQUENCES_AT_ONCE = 32
"""Their states are held in memory: 7 KB a token for 5 taps of a hidden size of 576."""

LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class States:
    """L rows of one sequence, in the target's type."""

    tokens: torch.Tensor  # [L] int64
    hidden: torch.Tensor  # [L, H] after the final norm
    taps: torch.Tensor  # [L, m, H]


class CaptureDrafter:
    """A Drafter (draft/base.py) that proposes nothing and keeps every fact it is shown."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.spec = DrafterSpec(name="capture", taps=taps)
        self._rows: dict[int, list[States]] = {}  # by device row, since its last tenant came
        self._left: list[list[States]] = []  # of tenants before

    def attach(self, memory: DraftMemory) -> None:
        return None

    def bind(self, row: int, last_page: int | None) -> None:
        if last_page is not None:
            raise EngineError("capture needs every row of a prompt, but a prefix-cache hit leaves some out")
        if row in self._rows:
            self._left.append(self._rows[row])
        self._rows[row] = []

    def draft(self, context: DraftContext, steps: int) -> Draft:
        raise ValueError(f"the capture drafter cannot draft {steps} steps")

    def publish(self, published: Published) -> None:
        hidden = published.hidden
        columns = zip(
            published.rows.tolist(), published.first.tolist(), published.committed.tolist(), strict=True
        )
        for row, first, count in columns:
            if row == PADDING_ROW or not count:
                continue
            part = slice(first, first + count)
            last = hidden.last[part].clone()
            taps = [tap[part] for tap in hidden.taps]
            stacked = torch.stack(taps, 1) if taps else last.new_empty(count, 0, last.shape[1])
            self._rows[row].append(States(published.tokens[part].clone(), last, stacked))

    def collect(self) -> dict[tuple[int, ...], States]:
        """What came since the last call, by the tokens of the sequence; equal sequences are one."""
        found = {}
        for parts in (*self._left, *self._rows.values()):
            if parts:
                tokens = torch.cat([part.tokens for part in parts])
                hidden = torch.cat([part.hidden for part in parts])
                taps = torch.cat([part.taps for part in parts])
                found[tuple(tokens.tolist())] = States(tokens, hidden, taps)
        self._left, self._rows = [], {row: [] for row in self._rows}
        return found


def capture(
    journal: Journal,
    total: int,
    writer: Writer,
    open_engine: Callable[[], tuple[OfflineEngine, CaptureDrafter]],
    progress: Progress,
    at_once: int = SEQUENCES_AT_ONCE,
) -> None:
    """Bring the dataset up to the first `total` answers of `journal`, in their order.

    Sequences go in the same batches whether or not a run was interrupted: one that was cut is run again, and
    of it only what is missing is written.
    """
    if writer.sequences < total:
        engine, drafter = open_engine()
        begin = writer.sequences // at_once * at_once
        records = islice(journal.read(begin), total - begin)
        while batch := list(islice(records, at_once)):
            progress("hidden states", writer.sequences, total)
            for captured in _run(batch, engine, drafter)[writer.sequences - begin :]:
                writer.append(captured)
            writer.flush()
            begin += len(batch)
    progress("hidden states", total, total)


def _run(batch: list[dict[str, Any]], engine: OfflineEngine, drafter: CaptureDrafter) -> list[Captured]:
    sequences = [(*record["prompt_ids"], *record["answer_ids"]) for record in batch]
    engine.answer([Ask(sequence, max_tokens=1) for sequence in sequences])
    states = drafter.collect()
    captured = []
    for record, sequence in zip(batch, sequences, strict=True):
        if sequence not in states:
            raise EngineError(f"the states of answer {record['id']} are incomplete")
        found = states[sequence]
        captured.append(
            Captured(
                tokens=found.tokens.to(torch.int32),
                hidden=found.hidden.to(torch.bfloat16),
                taps=found.taps.to(torch.bfloat16),
                log_z=log_normaliser(engine.parts.target, found.hidden),
                prompt_len=len(record["prompt_ids"]),
                held_out=record["held_out"],
                sampled=record["temperature"] >= NO_NOISE_BELOW,
            )
        )
    return captured


@torch.inference_mode()
def log_normaliser(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """[L] fp32 logsumexp of the full-vocabulary logits of states [L, H], a few rows at a time."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = [torch.logsumexp(target.logits(part).to(wide), -1) for part in hidden.split(LOGIT_ROWS)]
    return torch.cat(parts).float()
