"""What of an engine a calibration must fit: whether its requests do, and what would if they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.cost.schema import CalibrationSettings, ContextInterval, Control

Pair = tuple[int, int | None]
"""(K, d); d is None where no loops draft."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of the engine the settings must fit. `pairs`: the (K, d) to measure where those are the choice."""

    control: Control
    draft_width: int  # K, the largest
    request_buckets: tuple[int, ...]  # captured, ascending
    max_model_len: int
    cache_tokens: int  # KV tokens that all sequences together may hold
    block_size: int
    slots: int  # rounds in flight
    pairs: tuple[Pair, ...] = ()  # ascending


class Room:
    """Tokens that a request gains while one point is measured, against those there are.

    The worst case: every round of warmup (at least one) and windows commits K + 1 tokens, and so does every
    round in flight behind them.
    """

    def __init__(self, settings: CalibrationSettings, geometry: Geometry) -> None:
        self._settings = settings
        self._geometry = geometry
        self._per_round = geometry.draft_width + 1
        self._warmup = max(1, settings.warmup_steps)
        self._rounds = self._warmup + settings.windows_per_point * settings.window_steps

    @property
    def progress_tokens(self) -> int:
        return (self._rounds + self._geometry.slots) * self._per_round

    def lasts(self, context: ContextInterval, bucket: int) -> bool:
        """Whether `bucket` requests get through all windows after a prompt of one token."""
        return 1 + self.progress_tokens <= self._most(context, bucket)

    def prefill_within(self, context: ContextInterval, bucket: int) -> int:
        """Its prefill reduced so that `bucket` requests fit the context, but never below 1."""
        return max(1, min(context.prefill_tokens, self._most(context, bucket) - self.progress_tokens))

    def lacking(self, where: str, context: ContextInterval, buckets: Sequence[int]) -> list[str]:
        """Nothing, or why requests do not fit that context, with the numbers and settings that would fit."""
        largest, geometry, settings = max(buckets), self._geometry, self._settings
        need = context.prefill_tokens + self.progress_tokens
        if need <= self._most(context, largest):
            return []
        there = []
        if need > geometry.max_model_len:
            there.append(f"the model's context holds {geometry.max_model_len}")
        elif need > context.max_kv_length:
            there.append(f"the interval ends at {context.max_kv_length}")
        if need > self._cached(largest):
            there.append(
                f"the cache holds {self._cached(largest)} for each of {largest} requests "
                f"({geometry.cache_tokens} tokens in all, in pages of {geometry.block_size})"
            )
        smaller = self._smaller(context, need, buckets)
        advice = f"this would fit: {', or '.join(smaller)}" if smaller else "several of them must shrink"
        return [
            f"{where}: each request needs {need} tokens ({context.prefill_tokens} of prefill + "
            f"{self._per_round} in each of {self._warmup} warmup + {settings.windows_per_point} x "
            f"{settings.window_steps} window steps + {geometry.slots} rounds in flight), but "
            f"{' and '.join(there)}. Give a smaller explicit configuration (prefill_tokens, window_steps, "
            f"windows_per_point, warmup_steps, request_buckets); {advice}"
        ]

    def _cached(self, bucket: int) -> int:
        """Tokens that each of `bucket` requests may keep in whole pages."""
        pages = self._geometry.cache_tokens // self._geometry.block_size
        return pages // bucket * self._geometry.block_size

    def _most(self, context: ContextInterval, bucket: int) -> int:
        return min(self._geometry.max_model_len, context.max_kv_length, self._cached(bucket))

    def _smaller(self, context: ContextInterval, need: int, buckets: Sequence[int]) -> list[str]:
        """Changes of a single setting that would do."""
        settings, most = self._settings, self._most(context, max(buckets))
        rounds = (most - context.prefill_tokens) // self._per_round - self._geometry.slots - self._warmup
        found = []
        if (steps := rounds // settings.windows_per_point) >= 1:
            found.append(f"window_steps up to {steps}")
        if (windows := rounds // settings.window_steps) >= 1:
            found.append(f"windows_per_point up to {windows}")
        if (tokens := most - self.progress_tokens) >= 1:
            found.append(f"prefill_tokens up to {tokens}")
        if fitting := [bucket for bucket in buckets if need <= self._most(context, bucket)]:
            found.append(f"request_buckets up to {max(fitting)}")
        return found
