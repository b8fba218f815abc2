"""The null drafter: plain decoding. A part that is absent is a null object, not an if."""

from __future__ import annotations

import torch

from xspec.draft.base import Draft, DrafterSpec
from xspec.models.base import Hidden
from xspec.nn.inputs import ForwardInputs


class NoDrafter:
    spec = DrafterSpec(name="none", max_steps=0)

    def draft(self, rows: torch.Tensor, steps: int) -> Draft:
        raise ValueError(f"the null drafter cannot draft {steps} steps")

    def publish(
        self, hidden: Hidden, tokens: torch.Tensor, inputs: ForwardInputs, committed: torch.Tensor
    ) -> None:
        """It keeps no context."""
