"""Writing: resumed after a kill, honest about a full drive, careful with what lies at the output path."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from colibri_converter import convert
from colibri_converter.plan import make_plan
from colibri_converter.source import open_source

from libcolibri.errors import DiskSpaceError, SourceError
from libcolibri.format import read_manifest, verify

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"
SOURCE = TINY / "qwen3_moe"


class Killed(BaseException):
    """Stands for Ctrl-C and the like."""


def run(output, **options):
    return convert(options.pop("source", SOURCE), output, **({"quant": "q8_0", "tokenizer": False} | options))


def kill_after(fraction):
    def on_progress(stage, done, total):
        if done > fraction * total:
            raise Killed

    return on_progress


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.45, 0.7])
def test_a_killed_conversion_leaves_nothing_and_goes_on_file_by_file(tmp_path, fraction):
    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "out", on_progress=kill_after(fraction))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.partial"))
    report = run(tmp_path / "out")
    assert report.resumed == tuple(f"experts-{layer:05d}.safetensors" for layer in range(4))[: len(report.resumed)] or fraction > 0.5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_what_is_finished_is_taken_over(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path / "out", on_progress=kill_after(0.45))
    assert len(run(tmp_path / "out").resumed) >= 3


def test_other_options_or_another_source_start_over(tmp_path):
    for options in ({"quant": "f16"}, {"source": shutil.copytree(SOURCE, tmp_path / "copy")}):
        with pytest.raises(Killed):
            run(tmp_path / "out", force=True, on_progress=kill_after(0.4))
        assert run(tmp_path / "out", force=True, **options).resumed == ()


def test_a_damaged_leftover_is_found_when_read_back(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path / "out", on_progress=kill_after(0.45))
    path = tmp_path / ".out.converting" / "experts-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 255
    path.write_bytes(raw)
    with pytest.raises(Exception, match=r"experts-00000\.safetensors"):
        run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torn_notes_start_over(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path / "out", on_progress=kill_after(0.45))
    (tmp_path / ".out.converting" / "conversion.json").write_text('{"identity":')
    assert run(tmp_path / "out").resumed == ()


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("colibri_converter.plan.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DiskSpaceError, match=r"needs .* more on the drive"):
        run(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_drive_that_fills_up_meanwhile(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("colibri_converter.writer.os.fsync", full)
        with pytest.raises(DiskSpaceError, match="is full: free some space"):
            run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.partial"))
    run(tmp_path / "out")
    verify(tmp_path / "out")


def test_planned_sizes_are_exact(tmp_path):
    plan = make_plan(open_source(SOURCE), "q4_k_m")
    run(tmp_path / "out", quant="q4_k_m")
    assert plan.file_bytes == {name: entry.bytes for name, entry in read_manifest(tmp_path / "out").files.items()}


def test_an_existing_folder_is_never_touched_unless_it_is_a_model_and_forced(tmp_path):
    (tmp_path / "out").mkdir()
    run(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(SourceError, match="--force"):
        run(tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert run(tmp_path / "out", force=True, quant="f16").recipe == "f16"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_files_are_not_deleted_by_force(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("x")
    with pytest.raises(SourceError, match="no colibri model"):
        run(tmp_path / "a", force=True)
    run(tmp_path / "b")
    (tmp_path / "b" / "thesis.txt").write_text("x")
    with pytest.raises(SourceError, match=r"'thesis\.txt' in it is no part of the model"):
        run(tmp_path / "b", force=True)
    with pytest.raises(SourceError, match="is no folder"):
        run(tmp_path / "b" / "thesis.txt", force=True)


def test_a_failed_replacement_keeps_the_old_model(tmp_path):
    run(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(Killed):
        run(tmp_path / "out", force=True, quant="f16", on_progress=kill_after(0.9))
    assert contents(tmp_path / "out") == before


def test_progress_never_goes_back_and_ends_at_the_total(tmp_path):
    seen = []
    run(tmp_path / "out", on_progress=lambda *step: seen.append(step))
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    assert {step[0] for step in seen} == {"write", "verify"}


def test_tokenizer_files_are_copied_and_the_template_gets_its_own_file(tmp_path):
    folder = shutil.copytree(SOURCE, tmp_path / "hf")
    vocabulary = {"a": 0, "b": 1, "<s>": 2}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None, "byte_fallback": False}
    added = [{"id": 2, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>", "chat_template": "你好 {{ x }}"}))
    convert(folder, tmp_path / "out", quant="f32")
    manifest = verify(tmp_path / "out")
    assert manifest.tokenizer["file"] == "tokenizer.json"
    assert (tmp_path / "out" / "chat_template.jinja").read_text(encoding="utf-8") == "你好 {{ x }}"
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(manifest.files)
