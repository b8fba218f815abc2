"""The null drafter: plain decoding. A part that is absent is a null object, not an if."""

from __future__ import annotations

import torch

from xspec.draft.base import Draft, DraftContext, DrafterSpec, Published


class NoDrafter:
    spec = DrafterSpec(name="none")

    def attach(
        self,
        rows: int,
        slabs: tuple[torch.Tensor, ...],
        page_state: torch.Tensor,
        sink_page: int,
        block_size: int,
    ) -> None:
        return None

    def bind(self, row: int, last_page: int | None) -> None:
        return None

    def draft(self, context: DraftContext, steps: int) -> Draft:
        raise ValueError(f"the null drafter cannot draft {steps} steps")

    def publish(self, published: Published) -> None:
        return None
