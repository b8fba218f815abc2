"""model_type nanbeige (arXiv 2607.22083): llama layers run num_loops times, model.norm after every loop.

The family's other features (n-gram embeddings, split loops, hyper-connections, depth attention, QK norm)
are refused where a config switches them on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.models.blocks import EMBEDDING, FINAL_NORM, HEAD, LayerBuilder, layer_prefix, tensor_shapes
from xspec.models.config import ConfigReader, read_decoder_as
from xspec.models.looped import DECODER_KEYS, LoopedConfig, LoopedFamily, LoopedParts, refuse_unknown
from xspec.nn.embed import Embedding

LOOPS = "num_loops"
KNOWN = DECODER_KEYS | {LOOPS, "attention_bias", "mlp_bias"}
SWITCHES: Mapping[str, object] = {
    "qk_layernorm": False,
    "emb_neighbor_num": None,
    "insert_ngram_layer_idx": [],
    "ngram_insert_all_layers": False,
    "loop_loss_weights": [],  # a non-empty list overrides num_loops
    "skip_loop_final_norm": False,
    "enable_double_loop_split": False,
    "loop_middle_layers": None,
    "loop_share_kv": False,
    "mhc_diff_for_loop": False,
    "mhc_double_stream_position_for_loop": None,
    "enable_hyper_connection": False,
    "enable_mhc": False,
    "enable_h_res_identity": False,
    "mhc_identity_nohresparam": False,
    "enable_depth_attention": False,
}
# Sizes of features that the switches above turn off.
UNUSED = frozenset(
    ("emb_split_num", "emb_tp_num", "ngram_vocab_size_ratio", "ngram_mod_force_prime", "ngram_fused_mode")
    + ("ngram_embedding_hidden_size", "ngram_layer_downproject_size", "ngram_compressed_tokenizer")
    + ("skip_ngram_for_input", "num_residual_streams", "mhc_sinkhorn_iterations", "mhc_init_gating_factor")
    + ("depth_attention_stride", "depth_attention_recent_window", "depth_attention_static_anchor_once")
)


def read_config(raw: Mapping[str, Any]) -> LoopedConfig:
    def bias(config: ConfigReader) -> bool:
        return config.flag("attention_bias")

    return read_decoder_as(
        LoopedConfig,
        raw,
        check=lambda config: refuse_unknown(config, KNOWN | UNUSED, SWITCHES),
        loops=lambda config: config.size(LOOPS, 1),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=lambda config: config.flag("mlp_bias"),
    )


def build(config: LoopedConfig, build: LayerBuilder) -> LoopedParts:
    table = build.table(EMBEDDING)
    layers = [build.layer(layer_prefix(index), build.shape) for index in range(config.num_layers)]
    return LoopedParts(
        embedding=Embedding(table),
        core=build.stack(layers, build.norm(FINAL_NORM, config.hidden_size)),
        head=build.head(EMBEDDING, table, HEAD),
    )


FAMILY = LoopedFamily(read_config, tensor_shapes, HEAD, build)
