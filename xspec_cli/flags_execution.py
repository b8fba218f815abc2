"""Rows of the flag table: speculation, profiling, execution and graphs, kernels, and removed names."""

from __future__ import annotations

from xspec.setting import Kind
from xspec_cli.flags_types import Flag, honoured, inert, refused, removed

SPECULATIVE = "Speculative"
PROFILE = "Profile"
EXECUTION = "Execution"
KERNEL = "Kernel"
REMOVED = "Removed"

_NOT_YET = "not in this version yet"
_NO_SUFFIX = "it is only read with --speculative_algorithm=Suffix, which is refused"
_NO_PROFILE = "it is only read with the profiling flags, which are refused"
_NPU_ONLY = "it chooses an NPU kernel"
_NO_GRAPHS = "it shapes device graphs, which this device does not have"
_NO_WORKERS = "the engine is one process; nothing is passed between processes"

SPECULATIVE_FLAGS: tuple[Flag, ...] = (
    honoured("draft_model", SPECULATIVE,
             "directory of the drafter; empty takes the one that comes with the embedded model, or with "
             "--speculative_algorithm=MTP the layers inside a checkpoint that has them"),
    honoured("draft_quantization", SPECULATIVE,
             "how the drafter's linears are kept: none, int8 or int4 (as --quantization); auto is int4 for "
             "the drafters that come along, where the kernels can, else none; xLLM has no such flag"),
    honoured("speculative_algorithm", SPECULATIVE,
             "kind of drafter; auto is what the drafter itself says in its config.json",
             note="xLLM: MTP. Speculation is on out of the box for the embedded model, with the drafter that "
                  "comes along; other models speculate once they are given one"),
    honoured("num_speculative_tokens", SPECULATIVE,
             "tokens drafted a round; 0 switches speculation off, -1 is the drafter's own width (Looped: 4)",
             note="xLLM: 0. With a drafter at hand speculation changes the speed and never the text"),
    honoured("draft_loops", SPECULATIVE,
             "loops of a looped model that draft, with --speculative_algorithm=Looped; -1 is half of them; "
             "xLLM has no such flag"),
    honoured("speculation_policy", SPECULATIVE,
             "who chooses how many tokens are drafted, and with how many loops: fixed, acceptance_ema or "
             "goodput, from the candidates of --adaptive_spec_config; xLLM has no such flag"),
    honoured("adaptive_spec_config", SPECULATIVE,
             "JSON file with candidates and settings of --speculation_policy; empty takes the preset of the "
             "model; xLLM has no such flag"),
    honoured("adaptive_spec_cost_table", SPECULATIVE,
             "saved costs of --speculation_policy to load instead of measuring; xLLM has no such flag"),
    honoured("adaptive_spec_cost_table_output", SPECULATIVE,
             "new file to save measured costs of --speculation_policy to; xLLM has no such flag"),
    honoured("target_verify_width", SPECULATIVE,
             "drafts that are verified of each request and round; -1 is all of them"),
    honoured("enable_probabilistic_draft", SPECULATIVE,
             "draw drafts with the target's own noise instead of taking the likeliest token"),
    honoured("enable_adaptive_draft_step", SPECULATIVE,
             "choose how many tokens are drafted, up to --num_speculative_tokens, from measured costs (MTP); "
             "serve and bench do so unasked with the embedded model"),
    honoured("enable_adaptive_target_verify", SPECULATIVE,
             "choose how many drafts are verified, all being drafted, from measured costs (MTP, DSpark)"),
    honoured("adaptive_draft_step_config", SPECULATIVE,
             "JSON file with the policy and calibration sections of adaptive draft steps"),
    honoured("adaptive_draft_step_cost_table", SPECULATIVE,
             "saved costs of adaptive draft steps to load instead of measuring; xLLM has no such flag"),
    honoured("adaptive_draft_step_cost_table_output", SPECULATIVE,
             "new file to save measured costs of adaptive draft steps to; xLLM has no such flag"),
    honoured("adaptive_target_verify_calibration", SPECULATIVE,
             "JSON file that says what is measured at start for adaptive target verify"),
    honoured("adaptive_target_verify_cost_table", SPECULATIVE,
             "saved costs of adaptive target verify to load instead of measuring"),
    honoured("adaptive_target_verify_cost_table_output", SPECULATIVE,
             "new file to save measured costs of adaptive target verify to"),
    inert("enable_opt_validate_probs", SPECULATIVE, Kind.BOOL, False, "keep only chosen draft probabilities",
          "verification needs no draft probabilities"),
    inert("speculative_suffix_cache_max_depth", SPECULATIVE, Kind.INT32, 64, "depth of the suffix tree",
          _NO_SUFFIX),
    inert("speculative_suffix_max_spec_factor", SPECULATIVE, Kind.DOUBLE, 1.0, "draft length a match token",
          _NO_SUFFIX),
    inert("speculative_suffix_max_spec_offset", SPECULATIVE, Kind.DOUBLE, 0.0, "draft length added",
          _NO_SUFFIX),
    inert("speculative_suffix_min_token_prob", SPECULATIVE, Kind.DOUBLE, 0.1, "least probability drafted",
          _NO_SUFFIX),
    inert("speculative_suffix_max_cached_requests", SPECULATIVE, Kind.INT32, -1, "requests remembered",
          _NO_SUFFIX),
    inert("speculative_suffix_use_tree_spec", SPECULATIVE, Kind.BOOL, False, "draft trees", _NO_SUFFIX),
    inert("enable_mtp_draft_body_tp1", SPECULATIVE, Kind.BOOL, False, "undivided NPU drafter", _NPU_ONLY),
    inert("enable_atb_spec_kernel", SPECULATIVE, Kind.BOOL, False, "NPU speculation kernel", _NPU_ONLY),
)

PROFILE_FLAGS: tuple[Flag, ...] = (
    refused("enable_profile_step_time", PROFILE, Kind.BOOL, False, "measure step times at start", _NOT_YET),
    refused("enable_profile_token_budget", PROFILE, Kind.BOOL, False, "derive the token budget from them",
            _NOT_YET),
    refused("enable_latency_aware_schedule", PROFILE, Kind.BOOL, False, "schedule by latency limits",
            _NOT_YET),
    refused("max_global_ttft_ms", PROFILE, Kind.INT32, 2147483647, "limit of the time to the first token",
            _NOT_YET),
    refused("max_global_tpot_ms", PROFILE, Kind.INT32, 2147483647, "limit of the time of a token", _NOT_YET),
    refused("enable_forward_interruption", PROFILE, Kind.BOOL, False, "interrupt a running step",
            "device work is never interrupted"),
    refused("enable_online_profile", PROFILE, Kind.BOOL, False, "start a profiler over HTTP", _NOT_YET),
    inert("profile_max_prompt_length", PROFILE, Kind.INT32, 2048, "longest prompt measured", _NO_PROFILE),
    inert("enable_profile_kv_blocks", PROFILE, Kind.BOOL, True, "measure with filled KV blocks", _NO_PROFILE),
    inert("disable_ttft_profiling", PROFILE, Kind.BOOL, False, "leave prompts out of the measurement",
          _NO_PROFILE),
    inert("profile_backend", PROFILE, Kind.STRING, "torch", "profiler started over HTTP", _NO_PROFILE),
    inert("profile_dir", PROFILE, Kind.STRING, "", "where it writes", _NO_PROFILE),
)

EXECUTION_FLAGS: tuple[Flag, ...] = (
    honoured("device", EXECUTION, "what computes; auto takes the best device there is"),
    honoured("num_compute_threads", EXECUTION,
             "CPU threads that compute; 0 is OMP_NUM_THREADS, else every usable core"),
    honoured("cpu_kernels", EXECUTION,
             "whose kernels compute on a CPU: the native ones (bf16; torch's where sizes do not fit) or "
             "torch's; auto is native where they are there and fast; xLLM has no such flag"),
    honoured("batch_invariant", EXECUTION,
             "start only where a row's result never depends on the rows beside it, bit for bit: greedy text "
             "is then the same with and without speculation in bf16 too. The native kernels always compute "
             "so, at no cost; others are refused. xLLM has no such flag"),
    honoured("random_seed", EXECUTION, "seed of requests that bring none; -1 draws one at start"),
    honoured("enable_graph", EXECUTION, "run decode rounds from prepared, padded shapes",
             note="xLLM: false. Prepared shapes are how the engine works; off is for comparison"),
    honoured("python_graph_backend", EXECUTION, "what prepares them; auto is the device's own way",
             note="xLLM: off, which there also means the device's own way when graphs are on",
             allowed=("auto", "off", "cpu"),
             why="a CPU has no inductor, cudagraphs or aclgraph backend here"),
    honoured("disable_graph_warmup", EXECUTION,
             "prepare a shape when it is first needed, not before serving"),
    honoured("enable_graph_mode_decode_no_padding", EXECUTION,
             "prepare every row count instead of padding to a few"),
    honoured("round_trace", EXECUTION,
             "new file that gets a JSON line for every round: plan, shape, what was accepted, time; "
             "xLLM has no such flag"),
    refused("enable_unified_mtp_graph", EXECUTION, Kind.BOOL, False,
            "one graph for a whole speculative round",
            f"unified graphs are {_NOT_YET}"),
    inert("enable_prefill_piecewise_graph", EXECUTION, Kind.BOOL, False, "graphs for parts of a prompt step",
          _NO_GRAPHS),
    inert("max_tokens_for_graph_mode", EXECUTION, Kind.INT32, 2048, "longest prompt step of those graphs",
          _NO_GRAPHS),
    inert("enable_graph_double_buffer", EXECUTION, Kind.BOOL, True, "two sets of NPU graphs", _NO_GRAPHS),
    inert("acl_graph_decode_batch_size_limit", EXECUTION, Kind.INT32, 16, "largest batch of an NPU graph",
          _NO_GRAPHS),
    inert("enable_graph_vmm_pool", EXECUTION, Kind.BOOL, True, "memory pool of graphs", _NO_GRAPHS),
    inert("enable_shm", EXECUTION, Kind.BOOL, False, "shared memory between processes", _NO_WORKERS),
    inert("use_contiguous_input_buffer", EXECUTION, Kind.BOOL, True, "one buffer for a step's inputs",
          _NO_WORKERS),
    inert("input_shm_size", EXECUTION, Kind.UINT64, 1024, "MB of shared memory for inputs", _NO_WORKERS),
    inert("output_shm_size", EXECUTION, Kind.UINT64, 128, "MB of shared memory for outputs", _NO_WORKERS),
)

KERNEL_FLAGS: tuple[Flag, ...] = (
    inert("npu_kernel_backend", KERNEL, Kind.STRING, "AUTO", "NPU kernels: AUTO, ATB or TORCH", _NPU_ONLY,
          choices=("AUTO", "ATB", "TORCH")),
    inert("enable_customize_mla_kernel", KERNEL, Kind.BOOL, False, "NPU latent attention kernel", _NPU_ONLY),
    inert("enable_intralayer_addnorm", KERNEL, Kind.BOOL, False, "fused add and norm in a layer", _NPU_ONLY),
    inert("enable_interlayer_addnorm", KERNEL, Kind.BOOL, False, "fused add and norm between layers",
          _NPU_ONLY),
    inert("enable_fused_mc2", KERNEL, Kind.INT32, -1, "fused matmul and collective", _NPU_ONLY),
    inert("enable_split_rmsnorm_rope", KERNEL, Kind.BOOL, False, "fused split, norm and rope", _NPU_ONLY),
    inert("enable_aclnn_matmul", KERNEL, Kind.BOOL, False, "ACLNN matmul", _NPU_ONLY),
    inert("enable_aclnn_swiglu", KERNEL, Kind.BOOL, False, "ACLNN SwiGLU", _NPU_ONLY),
    inert("enable_mega_moe", KERNEL, Kind.BOOL, False, "fused expert kernel", _NPU_ONLY),
    inert("mega_moe_mode", KERNEL, Kind.STRING, "off", "newer name of that: off, auto or on", _NPU_ONLY,
          choices=("off", "auto", "on")),
    inert("enable_dspark_native_sas", KERNEL, Kind.BOOL, False, "NPU attention of the DSpark drafter",
          _NPU_ONLY),
    inert("enable_flashcomm1", KERNEL, Kind.BOOL, False, "NPU sequence-parallel collectives", _NPU_ONLY),
    inert("flashcomm1_min_prefill_tokens", KERNEL, Kind.INT32, 8192, "shortest prompt step for them",
          _NPU_ONLY),
    inert("enable_mmrs_fusion", KERNEL, Kind.BOOL, False, "fused matmul and reduce-scatter", _NPU_ONLY),
    inert("mmrs_comm_mode", KERNEL, Kind.STRING, "aiv", "its communication mode", _NPU_ONLY),
)

REMOVED_FLAGS: tuple[Flag, ...] = (
    removed("enable_adaptive_speculative_decode", REMOVED, Kind.BOOL, False,
            "use --enable_adaptive_target_verify"),
    removed("enable_adaptive_spec_prune", REMOVED, Kind.BOOL, False, "use --enable_adaptive_target_verify"),
    removed("adaptive_speculative_min_gain", REMOVED, Kind.DOUBLE, 0.0,
            "use --enable_adaptive_target_verify, which needs no least gain"),
    removed("enable_lag_confidence", REMOVED, Kind.BOOL, False,
            "use --enable_adaptive_target_verify, whose feedback always lags"),
    removed("devices", REMOVED, Kind.STRING, "", "use --device; one process drives one device"),
    removed("draft_devices", REMOVED, Kind.STRING, "",
            "a drafter shares the device of its target (--device)"),
)

FLAGS: tuple[Flag, ...] = (
    *SPECULATIVE_FLAGS, *PROFILE_FLAGS, *EXECUTION_FLAGS, *KERNEL_FLAGS, *REMOVED_FLAGS,
)
