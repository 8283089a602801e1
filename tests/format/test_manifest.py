"""colibri.json and the files it lists: written, read, refused, verified."""

import dataclasses
import errno
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.errors import FormatError
from libcolibri.format import (
    DENSE_NAME,
    MANIFEST_NAME,
    PARTS,
    ExpertsEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    check_files,
    dense_slots,
    expert_offsets,
    parse_manifest,
    plan_parts,
    read_manifest,
    verify,
    write_manifest,
)
from libcolibri.safetensors_header import build_header

TENSORS = {"model.embed_tokens.weight": TensorEntry("q8_0", (20, 64)), "model.norm.weight": TensorEntry("f32", (64,))}


@pytest.fixture
def model(tmp_path):
    """A model directory of one matrix, one vector and two experts, with a name that is not ASCII."""
    folder = tmp_path / "Modell ü 模型"
    folder.mkdir()
    header = build_header(
        ((n, "F32" if len(e.shape) == 1 else "U8", e.stored_shape) for n, e in TENSORS.items()),
    )
    body = np.random.default_rng(0).integers(0, 256, sum(e.nbytes for e in TENSORS.values()), dtype=np.uint8).tobytes()
    (folder / DENSE_NAME).write_bytes(header + body)
    types = {"gate_proj": "q8_0", "up_proj": "q8_0", "down_proj": "q4_0"}
    parts, size = plan_parts(types, {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)})
    experts = [np.random.default_rng(e).integers(0, 256, size, dtype=np.uint8).tobytes() for e in (1, 2)]
    name = "experts-00003.safetensors"
    (folder / name).write_bytes(build_header(((f"experts.{e}", "U8", (size,)) for e in range(2)), 4096) + b"".join(experts))
    files = {n: FileEntry((folder / n).stat().st_size, hashlib.sha256((folder / n).read_bytes()).hexdigest()) for n in (DENSE_NAME, name)}
    sums = tuple(f"{zlib.crc32(e):08x}" for e in experts)
    manifest = Manifest(
        kind="decoder", family="qwen3_moe", config={"hidden_size": 64}, quantization={"recipe": "q8_0"}, tensors=TENSORS,
        experts={3: ExpertsEntry(name, 2, size, **parts, crc32=sums)}, tokenizer=None, files=files, source={}, converter_version="1",
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder


def test_reading_gives_what_was_written(model):
    manifest = read_manifest(model)
    assert parse_manifest(manifest.to_json().encode(), "x") == manifest
    assert manifest.experts[3].parts["down_proj"].shape == (64, 32)


def test_parts_and_experts_are_aligned(model):
    entry = read_manifest(model).experts[3]
    assert entry.expert_bytes % 4096 == 0
    assert all(part.offset % 64 == 0 for part in entry.parts.values())
    offsets = expert_offsets(model, read_manifest(model), 3)
    assert all(offset % 4096 == 0 for offset in offsets)


def test_experts_without_a_gate_have_no_entry_for_it(model):
    manifest = read_manifest(model)
    full = manifest.experts[3]
    parts, size = plan_parts({"up_proj": "q8_0", "down_proj": "q4_0"}, {"up_proj": (32, 64), "down_proj": (64, 32)})
    assert list(parts) == ["up_proj", "down_proj"] and parts["up_proj"].offset == 0
    gateless = dataclasses.replace(manifest, experts={3: ExpertsEntry(full.file, 2, size, **parts, crc32=full.crc32)})
    assert "gate_proj" not in gateless.to_json()
    assert parse_manifest(gateless.to_json().encode(), "x") == gateless
    without_up = gateless.to_json().replace("up_proj", "other")
    with pytest.raises(FormatError, match="'up_proj' is missing"):
        parse_manifest(without_up.encode(), "x")


def test_a_sound_model_verifies_with_progress(model):
    seen = []
    assert verify(model, lambda *step: seen.append(step)).kind == "decoder"
    assert seen[-1][1] == seen[-1][2] == sum(entry.bytes for entry in read_manifest(model).files.values())


def test_a_damaged_expert_is_named(model):
    path = model / "experts-00003.safetensors"
    raw = bytearray(path.read_bytes())
    raw[expert_offsets(model, read_manifest(model), 3)[1] + 5] ^= 1
    path.write_bytes(raw)
    check_files(model, read_manifest(model))
    with pytest.raises(FormatError, match=r"experts-00003\.safetensors.*layer 3, expert 1\)"):
        verify(model)


def test_a_damaged_dense_file_is_named(model):
    raw = bytearray((model / DENSE_NAME).read_bytes())
    raw[-1] ^= 1
    (model / DENSE_NAME).write_bytes(raw)
    with pytest.raises(FormatError, match=r"dense\.safetensors: its contents are damaged"):
        verify(model)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "experts-00003.safetensors"])
def test_a_file_that_the_drive_does_not_give_is_named(model, name, monkeypatch):
    opened = Path.open

    def failing(path, *args, **kwargs):
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(FormatError, match=rf"{name}: cannot be read \(Input/output error\)"):
        verify(model)


def test_a_file_cut_short_is_named_without_reading_it(model):
    raw = (model / DENSE_NAME).read_bytes()
    (model / DENSE_NAME).write_bytes(raw[:-1])
    with pytest.raises(FormatError, match=f"has {len(raw) - 1} bytes, expected {len(raw)}"):
        check_files(model, read_manifest(model))


def test_a_missing_file_is_named(model):
    (model / DENSE_NAME).unlink()
    with pytest.raises(FormatError, match="missing from the model"):
        check_files(model, read_manifest(model))


def test_a_folder_without_manifest(tmp_path):
    with pytest.raises(FormatError, match="no colibri model"):
        read_manifest(tmp_path)


def edited(model, edit):
    data = json.loads((model / MANIFEST_NAME).read_text(encoding="utf-8"))
    edit(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize("version", ["2.0", "0.9", "1", 1.0, None, "x", "1.0.0", "10.0"])
def test_other_versions_are_refused_with_the_command_that_helps(model, version):
    with pytest.raises(FormatError, match="colibri-convert"):
        parse_manifest(edited(model, lambda data: data.update(format_version=version)), "x")


def test_a_newer_minor_version_may_say_more(model):
    raw = edited(model, lambda data: data.update(format_version="1.7", novelty=1) or data["experts"]["3"].update(more=2))
    assert parse_manifest(raw, "x").family == "qwen3_moe"


EDITS = {
    "unknown key": lambda d: d.update(novelty=1),
    "missing key": lambda d: d.pop("files"),
    "kind": lambda d: d.update(kind="diffuser"),
    "config": lambda d: d.update(config=[]),
    "type": lambda d: d["tensors"]["model.embed_tokens.weight"].update(type="q9_9"),
    "shape": lambda d: d["tensors"]["model.embed_tokens.weight"].update(shape=[20, 63]),
    "huge shape": lambda d: d["tensors"]["model.embed_tokens.weight"].update(shape=[20, -64]),
    "vector type": lambda d: d["tensors"]["model.norm.weight"].update(type="f16"),
    "climbing file": lambda d: d["files"].update({"../x": d["files"][DENSE_NAME]}),
    "absolute file": lambda d: d["files"].update({"/etc/passwd": d["files"][DENSE_NAME]}),
    "drive": lambda d: d["files"].update({"C:x": d["files"][DENSE_NAME]}),
    "sha": lambda d: d["files"][DENSE_NAME].update(sha256="0"),
    "offset": lambda d: d["experts"]["3"]["up_proj"].update(offset=0),
    "expert size": lambda d: d["experts"]["3"].update(expert_bytes=4096),
    "checksums": lambda d: d["experts"]["3"].update(crc32=[]),
    "layer": lambda d: d["experts"].update({"03": d["experts"]["3"]}),
    "shared file": lambda d: d["experts"].update({"4": d["experts"]["3"]}),
    "unlisted file": lambda d: d["experts"]["3"].update(file="other.safetensors"),
    "tokenizer": lambda d: d.update(tokenizer={"file": "tokenizer.json"}),
}


@pytest.mark.parametrize("name", EDITS)
def test_faulty_manifests(model, name):
    with pytest.raises(FormatError) as error:
        parse_manifest(edited(model, EDITS[name]), "colibri.json")
    assert "colibri.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_manifest_and_dense_file_must_name_the_same_tensors(model):
    manifest = dataclasses.replace(read_manifest(model), tensors={**TENSORS, "lm_head.weight": TensorEntry("q8_0", (20, 64))})
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        dense_slots(model, manifest)


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
JSON = st.recursive(LEAVES, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3), max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_manifests_give_a_result_or_a_format_error(data):
    entry = {"type": "q8_0", "shape": [16, 32], "offset": 0, "bytes": 544}
    manifest = {
        "format_version": "1.0", "kind": "decoder", "family": "x", "config": {}, "quantization": {}, "tokenizer": None, "source": {},
        "converter_version": "1", "tensors": {"a": {"type": "f32", "shape": [4]}}, "files": {DENSE_NAME: {"bytes": 1, "sha256": "0" * 64}},
        "experts": {"0": dict.fromkeys(PARTS, entry) | {"file": "e", "num_experts": 1, "expert_bytes": 4096, "crc32": []}},
    }  # fmt: skip
    node = manifest
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [key for key, value in node.items() if isinstance(value, dict) and value]
        if inner:
            node = node[data.draw(st.sampled_from(sorted(inner)))]
    node[data.draw(st.sampled_from(sorted(node)))] = data.draw(JSON)
    try:
        parse_manifest(json.dumps(manifest).encode(), "x")
    except FormatError:
        return
