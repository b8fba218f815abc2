"""The one exception tree. Surfaces translate it; nothing below raises bare ValueError at a user.

XspecError
├── ConfigError            start-up: a flag, file or combination that cannot be honoured
│   ├── CalibrationError   costs that cannot be measured, fitted, saved or loaded as asked
│   ├── CheckpointError    a model directory or GGUF file that is not what its config says
│   └── UnsupportedError   a combination of parts; carries every reason at once
├── RequestError           admission: one request is wrong, the engine is fine
│   ├── PromptTooLongError
│   └── OverloadedError    try again later (queue full, draining)
└── EngineError            the engine failed while it held the request
    └── EngineDeadError    and cannot go on
"""

from __future__ import annotations

from collections.abc import Sequence


class XspecError(Exception):
    """Base of everything xspec raises on purpose."""


class ConfigError(XspecError):
    """A start-up setting cannot be honoured. The message names flag, value found and values allowed."""


class CalibrationError(ConfigError):
    """Costs cannot be measured, fitted, saved or loaded as asked. `reasons` lists all of them where several
    can be told at once; the message holds them too."""

    def __init__(self, what: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{what}:{lines}" if lines else what)


class CheckpointError(ConfigError):
    """The files of a model are missing, malformed or do not match its config."""


class UnsupportedError(ConfigError):
    """Parts that do not fit together. `reasons` lists all of them, not only the first."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}:\n" + "\n".join(f"  - {reason}" for reason in self.reasons))


class RequestError(XspecError):
    """A request is refused at admission. `param` is the offending field, as OpenAI error bodies name it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class PromptTooLongError(RequestError):
    """The prompt leaves no room for one token within max_model_len."""


class OverloadedError(RequestError):
    """The engine takes no more requests now. `draining` tells a shutdown from a full queue."""

    def __init__(self, message: str, *, draining: bool = False) -> None:
        self.draining = draining
        super().__init__(message)


class EngineError(XspecError):
    """The engine failed while it held this request; the request may be sent again."""


class EngineDeadError(EngineError):
    """The engine failed and cannot go on; every request fails until the process is restarted."""
