"""Rows of the flag table: parallelism, expert balancing, many nodes, split prefill and decode."""

from __future__ import annotations

from xspec.setting import Kind
from xspec_cli.flags_types import Flag, inert, refused

PARALLEL = "Parallel"
EPLB = "EPLB"
DISTRIBUTED = "Distributed"
DISAGG_PD = "DisaggPD"

_ONE_PROCESS = "more than one process is not in this version yet"
_ONE_DEVICE = "one process computes on one device"
_NO_EPLB = "it is only read with --enable_eplb, which is refused"
_NO_PEERS = "it is only read with --nnodes above 1, which is refused"
_NO_REGISTRY = "it is only read with --etcd_addr, which is refused"
_NO_PD = "it is only read with --enable_disagg_pd, which is refused"

PARALLEL_FLAGS: tuple[Flag, ...] = (
    refused("dp_size", PARALLEL, Kind.INT32, 1, "data parallel groups", _ONE_PROCESS),
    refused("ep_size", PARALLEL, Kind.INT32, 1, "expert parallel groups", _ONE_PROCESS),
    refused("cp_size", PARALLEL, Kind.INT32, 1, "context parallel processes", _ONE_PROCESS),
    refused("tp_size", PARALLEL, Kind.INT64, 1,
            "tensor parallel processes of image models; text models use --nnodes",
            _ONE_PROCESS),
    refused("sp_size", PARALLEL, Kind.INT64, 1, "sequence parallel processes of image models", _ONE_PROCESS),
    refused("layerwise_split_size", PARALLEL, Kind.INT32, 1, "layers split over processes", _ONE_PROCESS),
    refused("kv_split_size", PARALLEL, Kind.INT32, 1, "KV cache split over processes", _ONE_PROCESS,
            also=(0,)),
    inert("communication_backend", PARALLEL, Kind.STRING, "hccl", "NPU collectives: hccl or lccl",
          _ONE_DEVICE),
    inert("enable_multi_stream_parallel", PARALLEL, Kind.BOOL, False, "compute and communicate at once",
          _ONE_DEVICE),
    inert("micro_batch_num", PARALLEL, Kind.INT32, 1, "parts of a batch for that", _ONE_DEVICE),
    inert("enable_dp_balance", PARALLEL, Kind.BOOL, False, "even out data parallel groups",
          "it is only read with --dp_size above 1, which is refused"),
    inert("enable_mm_encoder_dp", PARALLEL, Kind.BOOL, False, "data parallel image encoder",
          "only text models are served"),
)

EPLB_FLAGS: tuple[Flag, ...] = (
    refused("enable_eplb", EPLB, Kind.BOOL, False, "balance experts over devices", _ONE_PROCESS),
    inert("redundant_experts_num", EPLB, Kind.INT32, 1, "spare experts a device", _NO_EPLB),
    inert("eplb_update_interval", EPLB, Kind.INT64, 1000, "steps between updates", _NO_EPLB),
    inert("eplb_min_peak_load_improvement", EPLB, Kind.DOUBLE, 0.05, "gain that is worth an update",
          _NO_EPLB),
    inert("eplb_policy_kind", EPLB, Kind.STRING, "balanced", "how experts are placed", _NO_EPLB),
    inert("eplb_use_decode_only_load", EPLB, Kind.BOOL, False, "measure load in decode rounds only",
          _NO_EPLB),
    inert("eplb_prepare_timeout_seconds", EPLB, Kind.INT32, 30, "time limit of an update", _NO_EPLB),
    refused("expert_parallel_degree", EPLB, Kind.INT32, 0, "expert parallel mode", _ONE_PROCESS),
    inert("rank_tablefile", EPLB, Kind.STRING, "", "NPU rank table", _ONE_DEVICE),
)

DISTRIBUTED_FLAGS: tuple[Flag, ...] = (
    refused("nnodes", DISTRIBUTED, Kind.INT32, 1, "processes of the engine, one a device", _ONE_PROCESS),
    refused("node_rank", DISTRIBUTED, Kind.INT32, 0, "which of them this is", _ONE_PROCESS),
    inert("master_node_addr", DISTRIBUTED, Kind.STRING, "127.0.0.1:19888", "where processes meet", _NO_PEERS),
    inert("virtual_memory_master_node_addr", DISTRIBUTED, Kind.STRING, "127.0.0.1:19889",
          "where they meet for virtual memory", _NO_PEERS),
    inert("xtensor_master_node_addr", DISTRIBUTED, Kind.STRING, "127.0.0.1:19889", "older name of that",
          _NO_PEERS),
    refused("etcd_addr", DISTRIBUTED, Kind.STRING, "", "registry the service announces itself to",
            "put a router in front of several engines instead"),
    inert("etcd_namespace", DISTRIBUTED, Kind.STRING, "", "key prefix in it", _NO_REGISTRY),
    inert("etcd_ttl", DISTRIBUTED, Kind.INT32, 3, "life of an entry in it, seconds", _NO_REGISTRY),
    inert("heart_beat_interval", DISTRIBUTED, Kind.DOUBLE, 0.5, "seconds between signs of life",
          _NO_REGISTRY),
    refused("enable_service_routing", DISTRIBUTED, Kind.BOOL, False, "be routed to by xLLM's service",
            "put a router in front of several engines instead"),
)

DISAGG_PD_FLAGS: tuple[Flag, ...] = (
    refused("enable_disagg_pd", DISAGG_PD, Kind.BOOL, False, "prefill and decode on different instances",
            "prefill and decode share one engine"),
    refused("enable_pd_ooc", DISAGG_PD, Kind.BOOL, False, "online and offline work in that mode",
            "prefill and decode share one engine"),
    refused("instance_role", DISAGG_PD, Kind.STRING, "DEFAULT", "part of this instance in it",
            "prefill and decode share one engine"),
    inert("disagg_pd_port", DISAGG_PD, Kind.INT32, 7777, "its port", _NO_PD),
    inert("kv_cache_transfer_type", DISAGG_PD, Kind.STRING, "Mooncake", "what moves KV between instances",
          _NO_PD),
    inert("kv_cache_transfer_mode", DISAGG_PD, Kind.STRING, "PUSH", "who moves it", _NO_PD),
    inert("transfer_listen_port", DISAGG_PD, Kind.INT32, 26000, "port it is moved through", _NO_PD),
    inert("kv_push_dst_rotate", DISAGG_PD, Kind.BOOL, False, "order in which it is moved", _NO_PD),
)

FLAGS: tuple[Flag, ...] = (*PARALLEL_FLAGS, *EPLB_FLAGS, *DISTRIBUTED_FLAGS, *DISAGG_PD_FLAGS)
