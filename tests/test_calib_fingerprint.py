"""What measured costs hold for: every fact that changes a round's cost changes its key, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from xspec.calib import fingerprint as module
from xspec.calib.fingerprint import EDGE_BYTES, SAMPLE_BYTES, SAMPLES, checkpoint_digest, fingerprint
from xspec.config import Config
from xspec.core.shapes import BucketGrid
from xspec.cost.settings import Control
from xspec.draft.choose import DraftChoice
from xspec.errors import CheckpointError
from xspec.platform.cpu import CpuPlatform, cpu_model

CONTROLS = [Control.DRAFT_STEP, Control.TARGET_VERIFY]
"""Of SPEC see test_spec_costs.py."""

FLAGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "block size": ({"block_size": 16}, {"block_size"}),
    "quantised target": ({"quantization": "int4"}, {"quantization"}),
    "quantised drafter": ({"draft_quantization": "int8"}, {"draft_quantization"}),
    "probabilistic": ({"enable_probabilistic_draft": True}, {"probabilistic_draft"}),
    "no overlap": ({"enable_schedule_overlap": False}, {"schedule_overlap", "slots"}),
    "no pipeline": ({"enable_task_pipeline": False}, {"task_pipeline", "slots"}),
    "no graphs": ({"enable_graph": False}, {"graph"}),
    "backend off": ({"python_graph_backend": "off"}, {"graph_backend"}),
    "the default backend by name": ({"python_graph_backend": "cpu"}, set()),
    "token budget": ({"max_tokens_per_batch": 64}, set()),
    "chunks": ({"max_tokens_per_chunk_for_prefill": 16}, set()),
    "no mixing": ({"enable_mix_batch": False}, set()),
    "no prefix cache": ({"enable_prefix_cache": False}, set()),
    "more rows": ({"max_seqs_per_batch": 100}, set()),  # the grid is a fact of its own
    "seed": ({"random_seed": 5}, set()),
    "port": ({"port": 1}, set()),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for index, name in enumerate(("target", "mtp", "other")):
        made[name] = folder / name
        made[name].mkdir()
        (made[name] / "config.json").write_text("{}")
        save_file({"w": torch.full((4,), float(index))}, made[name] / "model.safetensors")
    return made


def facts(
    checkpoints: dict[str, Path], flags: dict[str, Any] | None = None, **changed: Any
) -> dict[str, Any]:
    given = {
        "model": checkpoints["target"],
        "choice": DraftChoice("MTP", checkpoints["mtp"], 4, 4),
        "control": Control.DRAFT_STEP,
        "dtype": torch.float32,
        "grid": BucketGrid([1, 2, 4]),
    }
    return fingerprint(Config.from_mapping(flags or {}), CpuPlatform(), **(given | changed))


def differing(one: dict[str, Any], two: dict[str, Any]) -> set[str]:
    assert one.keys() == two.keys()
    return {key for key in one if one[key] != two[key]}


def test_the_mapping_is_plain_and_the_same_every_time(checkpoints: dict[str, Path]) -> None:
    found = facts(checkpoints)
    assert found == facts(checkpoints)
    assert all(isinstance(value, str | int | bool) for value in found.values())
    assert (found["control"], found["algorithm"], found["draft_width"]) == ("draft_step", "MTP", 4)
    assert (found["dtype"], found["request_buckets"]) == ("float32", "1,2,4")
    assert (found["dp_size"], found["tp_size"], found["cp_size"], found["unified_graph"]) == (1, 1, 1, False)
    assert str(found["torch_patch"]).startswith(f"{found['torch']}.")


@pytest.mark.parametrize("name", FLAGS)
def test_flags_change_exactly_their_facts(checkpoints: dict[str, Path], name: str) -> None:
    flags, keys = FLAGS[name]
    assert differing(facts(checkpoints), facts(checkpoints, flags)) == keys


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"control": Control.TARGET_VERIFY}, {"control"}),
        ({"dtype": torch.bfloat16}, {"dtype"}),
        ({"grid": BucketGrid([1, 2, 4, 8])}, {"request_buckets"}),
        ({"model": "other"}, {"target"}),
        ({"choice": ("MTP", "other", 4)}, {"drafter"}),
        ({"choice": ("MTP", None, 4)}, {"drafter"}),
        ({"choice": ("MTP", "mtp", 5)}, {"draft_width"}),
        ({"choice": ("DSpark", "mtp", 4)}, {"algorithm"}),
    ],
)
def test_parts_change_exactly_their_facts(
    checkpoints: dict[str, Path], changed: dict[str, Any], keys: set[str]
) -> None:
    if "model" in changed:
        changed = {"model": checkpoints[changed["model"]]}
    if "choice" in changed:
        algorithm, path, steps = changed["choice"]
        changed = {"choice": DraftChoice(algorithm, checkpoints[path] if path else None, steps, steps)}
    assert differing(facts(checkpoints), facts(checkpoints, **changed)) == keys


def test_machine_and_versions_change_exactly_their_facts(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts(checkpoints)
    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "device_name", lambda self: "another CPU, 3 usable cores")
        assert differing(before, facts(checkpoints)) == {"device"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "__version__", "99.0")
        assert differing(before, facts(checkpoints)) == {"xspec"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert differing(before, facts(checkpoints)) == {"compute_threads"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", f"{before['torch']}.99+other")
        assert differing(before, facts(checkpoints)) == {"torch_patch"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.1.0")
        assert differing(before, facts(checkpoints)) == {"torch", "torch_patch"}


@given(st.fixed_dictionaries({
    "steps": st.integers(1, 16), "algorithm": st.sampled_from(["MTP", "DSpark"]),
    "control": st.sampled_from(CONTROLS), "block_size": st.integers(1, 64),
    "buckets": st.sets(st.integers(1, 64), min_size=1),
    "enable_schedule_overlap": st.booleans(), "enable_graph": st.booleans(),
}), st.data())  # fmt: skip
def test_equal_facts_if_and_only_if_equal_choices(
    checkpoints: dict[str, Path], one: dict[str, Any], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(list(one)))
    values = {
        "steps": st.integers(1, 16), "algorithm": st.sampled_from(["MTP", "DSpark"]),
        "control": st.sampled_from(CONTROLS), "block_size": st.integers(1, 64),
        "buckets": st.sets(st.integers(1, 64), min_size=1),
    }  # fmt: skip
    two = one | {key: data.draw(values.get(key, st.booleans()))}

    def of(choice: dict[str, Any]) -> dict[str, Any]:
        flags = {k: choice[k] for k in ("block_size", "enable_schedule_overlap", "enable_graph")}
        return facts(
            checkpoints,
            flags,
            choice=DraftChoice(choice["algorithm"], checkpoints["mtp"], choice["steps"], choice["steps"]),
            control=choice["control"],
            grid=BucketGrid(choice["buckets"]),
        )

    names = {
        "steps": {"draft_width"}, "buckets": {"request_buckets"}, "enable_graph": {"graph"},
        "enable_schedule_overlap": {"schedule_overlap", "slots"},
    }  # fmt: skip
    assert differing(of(one), of(two)) == (set() if one == two else names.get(key, {key}))


def checkpoint(folder: Path, weights: bytes, config: str = "{}", name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / name).write_bytes(weights)
    return folder


def test_the_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "a", b"abc"), checkpoint(tmp_path / "b", b"abc")
    assert checkpoint_digest(one) == checkpoint_digest(two)
    (two / "README.md").write_text("words")
    (two / "tokenizer.json").write_text("{}")
    assert checkpoint_digest(one) == checkpoint_digest(two), "what is neither config nor weights says nothing"
    others = [
        checkpoint(tmp_path / "c", b"abd"),
        checkpoint(tmp_path / "d", b"abc\0"),
        checkpoint(tmp_path / "e", b"abc", config='{"a": 1}'),
        checkpoint(tmp_path / "f", b"abc", name="other.safetensors"),
    ]
    shards = checkpoint(tmp_path / "g", b"a", name="1.safetensors")
    (shards / "2.safetensors").write_bytes(b"bc")
    assert len({checkpoint_digest(path) for path in (one, *others, shards)}) == 6


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """A change is seen at both edges and in a piece between; what lies between pieces is not read."""
    size = 16 * 2**20
    file = tmp_path / "model.gguf"
    stride = (size - 2 * EDGE_BYTES) // SAMPLES
    places = {
        "first": 0,
        "end of the first edge": EDGE_BYTES - 1,
        "a piece": EDGE_BYTES + 5 * stride + SAMPLE_BYTES - 1,
        "the last edge": size - EDGE_BYTES,
        "last": size - 1,
    }
    assert stride > SAMPLE_BYTES and size > 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES

    def digest(at: int | None) -> str:
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        file.write_bytes(data)
        return checkpoint_digest(file)

    same = digest(None)
    assert len({same, *(digest(at) for at in places.values())}) == 6
    assert digest(EDGE_BYTES + 5 * stride + SAMPLE_BYTES) == same


def test_a_checkpoint_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_digest(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_digest(tmp_path / "nothing.gguf")


def test_the_device_is_named_by_model_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2.30GHz\n\nmodel name\t: Other\n")
    assert cpu_model(info) == "Some CPU @ 2.30GHz"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu_model(info) == cpu_model(tmp_path / "nothing") == ""
    monkeypatch.setattr("xspec.platform.cpu.usable_cores", lambda: 3)
    assert CpuPlatform().device_name().endswith(", 3 usable cores")
    monkeypatch.setattr("xspec.platform.cpu.usable_cores", lambda: 1)
    monkeypatch.setattr("xspec.platform.cpu.cpu_model", lambda path: "Some CPU")
    assert CpuPlatform().device_name() == "Some CPU, 1 usable core"
