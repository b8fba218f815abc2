"""The null drafter: plain decoding. A part that is absent is a null object, not an if."""

from __future__ import annotations

from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, Published


class NoDrafter:
    spec = DrafterSpec(name="none")

    def attach(self, memory: DraftMemory) -> None:
        return None

    def bind(self, row: int, last_page: int | None) -> None:
        return None

    def draft(self, context: DraftContext, steps: int) -> Draft:
        raise ValueError(f"the null drafter cannot draft {steps} steps")

    def publish(self, published: Published) -> None:
        return None
