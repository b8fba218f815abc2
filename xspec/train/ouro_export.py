"""An Ouro on disk, under the published tensor names and config keys, with its tokenizer; and back again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from xspec.errors import CheckpointError
from xspec.train.journal import write_atomically
from xspec.train.mtp import write_model
from xspec.train.ouro_corpus import END, TOKENIZER, Corpus
from xspec.train.ouro_model import OuroModel, OuroSizes

TRAINING = "training.json"
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "loops": "total_ut_steps",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}


def export(
    path: Path, model: OuroModel, corpus: Corpus, max_position: int, training: Mapping[str, Any]
) -> None:
    """Weights in fp16, all that serving needs, and in training.json how they were made.

    CheckpointError if a weight does not fit into fp16.
    """
    path.mkdir(parents=True, exist_ok=True)
    end = int(corpus.tokenizer.token_to_id(END) or 0)
    write_atomically(path / TRAINING, json.dumps(dict(training), indent=1) + "\n")
    write_atomically(path / TOKENIZER, corpus.tokenizer.to_str(pretty=True))
    special = {"bos_token": END, "eos_token": END, "add_bos_token": False, "model_max_length": max_position}
    write_atomically(path / "tokenizer_config.json", json.dumps(special, indent=1) + "\n")
    ends = {"bos_token_id": end, "eos_token_id": end}
    write_atomically(path / "generation_config.json", json.dumps(ends, indent=1) + "\n")
    write_model(path, make_config(model.sizes, max_position, end), tensors(model))


def tensors(model: OuroModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        found[name] = parameter.detach().cpu().to(torch.float16).contiguous()
        if not torch.isfinite(found[name]).all():
            raise CheckpointError(f"{name} holds values that fp16 cannot: the run has diverged")
    return found


def make_config(sizes: OuroSizes, max_position: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        **{key: getattr(sizes, field) for field, key in _SIZES.items()},
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rope_scaling": None,
        "early_exit_threshold": 1.0,
        "layer_types": ["full_attention"] * sizes.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float16",
    }


def load(path: Path) -> tuple[OuroModel, int]:
    """An exported model in fp32, and its greatest position. CheckpointError if it is not one of ours."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        sizes = OuroSizes(**{field: config[key] for field, key in _SIZES.items()})
        if config["model_type"] != "ouro" or config["num_key_value_heads"] != sizes.heads:
            raise ValueError("it is no Ouro whose heads all have keys of their own")
        model = OuroModel(sizes, torch.Generator())
        state = load_file(path / "model.safetensors")
        model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds no Ouro that xspec train has made: {error}") from error
    return model.eval(), int(config["max_position_embeddings"])
