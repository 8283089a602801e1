"""One loaded model: weights, experts, threads, tokenizer. Shared by any number of sessions and Python threads.

In:  a model directory and how much of the machine to use
Out: sessions; forward passes, one at a time, in the order of asking
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from .arena import can_give_back
from .cache_warmer import CacheWarmer
from .config import ModelConfig
from .cpus import usable_cores
from .drive_settings import KnownDrives
from .errors import ColibriError, ConfigError, FormatError, MemoryBudgetError
from .eviction import DEFAULT_POLICY
from .expert_cache import Expert, ExpertCache, check_floor, check_pins, floor_bytes
from .expert_store import ExpertStore
from .expert_trace import TraceWriter
from .format import Manifest, check_files, read_manifest
from .loader import dense_bytes, load_weights
from .memory_plan import (
    CacheBudget,
    MemoryPlan,
    Needs,
    available_memory,
    choose_context,
    parse_budget,
    plan_memory,
    resident_bytes,
    size_text,
)
from .memory_watch import MemoryWatch
from .models.registry import parse_config
from .prefetch import Prefetch
from .roofline import Roofline
from .session import Session
from .stats import ExpertStats, PhaseStats
from .turn_lock import TurnLock
from .usage_history import UsageHistory, history_file

PREFILL_CHUNK_TOK = 128  # long enough for the kernels of a dense model
MOE_CHUNK_TOK = 512  # an expert gets few of a chunk's tokens, and is read anew for every chunk when memory does not hold it
MAX_THREADS = 256
# Measured beside the plan: kernels 4 to 8 MB, a vocabulary of 49,152 tokens 24 MB, one of 151,936 tokens 58 MB.
KERNEL_BYTES, VOCABULARY_BYTES, TOKEN_BYTES = 8_000_000, 8_000_000, 330
SPARE_BYTES = 64 << 20  # never planned: the first start ever compiles kernels, which takes 30 to 90 MB more

Progress = Callable[[str, int, int], None]  # what, done, of how much


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is put together from. Everything here costs an import that only an opened model needs."""

    decoder: Any  # Decoder(config, weights, team, experts, context_length=, max_chunk_tok=, kv_dtype=); .activation_bytes(...)
    state: Any  # .bytes_for(states, context_length, chunk_tok, kv_dtype)
    team: Any  # Team(threads)
    load_tokenizer: Callable[[Path, dict], Any]
    load_chat_template: Callable[[Path], Any]
    make_sampler: Callable[[Any], Any]  # SamplingParams | None -> .pick(logits, history)
    make_stop: Callable[[Sequence[str]], Any]  # stop strings -> .push(text), .flush()


def default_parts() -> Parts:
    """The parts of this library, imported now: kernels compile on import, which `--help` and a host program's start should not pay."""
    from .chat_template import ChatTemplate
    from .models.decoder import Decoder
    from .models.state import SequenceState
    from .sampler import Sampler, SamplingParams
    from .stop import StopStrings
    from .thread_team import Team
    from .tokenizer import Tokenizer

    def make_sampler(params: SamplingParams | None) -> Sampler:
        return Sampler(params or SamplingParams())

    return Parts(Decoder, SequenceState, Team, Tokenizer.load, ChatTemplate.load, make_sampler, StopStrings)


@dataclass(frozen=True, slots=True)
class _ExpertOptions:
    """What `Engine.open` was told about the experts."""

    policy: str
    preload: bool
    trace: str | Path | None
    verify: bool
    mirror: Path | None
    drive_settings: str | Path | None
    usage_history: str | Path | None
    pins: frozenset[Expert]
    prefetch: Prefetch | None


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: its logits as asked for, its duration without waiting for others, what the expert cache did in it.

    computed_bytes   weights, keys and values that it had to go through, each once: dense part, chosen experts, what its last token sees
    """

    logits: np.ndarray | None
    seconds: float
    experts: ExpertStats
    computed_bytes: int = 0


class Engine:
    """A loaded model; a context manager. Made by `open`.

    config, manifest           what the model is
    plan                       MemoryPlan, what goes where
    tokenizer, chat_template   None when the model has none
    context_length, threads    as chosen
    end_ids                    token ids that end a text
    usage                      UsageHistory, None unless asked for
    warmer                     CacheWarmer, what fills the expert cache beside the passes; None where there is nothing to fill it with
    """

    def __init__(
        self, path: Path, manifest: Manifest, config: ModelConfig, plan: MemoryPlan, threads: int, prefill_chunk: int, parts: Parts
    ):
        self.path, self.manifest, self.config, self.plan, self.threads, self.parts = path, manifest, config, plan, threads, parts
        self.context_length = plan.context_length
        self.prefill_chunk = min(prefill_chunk, plan.context_length)
        self.tokenizer: Any = None
        self.chat_template: Any = None
        self.experts: ExpertCache | None = None
        self.usage: UsageHistory | None = None
        self.warmer: CacheWarmer | None = None
        self._decoder: Any = None
        self._memory_bytes_s: float | None = None
        self._trace: TraceWriter | None = None
        self._store: ExpertStore | None = None
        self._useless_mirror: Path | None = None
        self._drive_remarks: tuple[str, ...] = ()
        self._lock = TurnLock()
        self._closing = ExitStack()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        threads: int | None = None,
        context_length: int | None = None,
        expert_cache: str | int = "auto",
        prefetch: str | bool = "auto",
        preload: bool = False,
        on_progress: Progress | None = None,
        *,
        prefill_chunk: int | None = None,
        expert_policy: str = "auto",
        trace: str | Path | None = None,
        usage_history: str | Path | None = None,
        pin: Iterable[Expert] = (),
        verify_experts: bool = False,
        mirror: str | Path | None = None,
        drive_settings: str | Path | None = None,
        parts: Parts | None = None,
    ) -> Self:
        """Load a model directory.

        threads          compute threads; None: the physical cores this process may use
        context_length   tokens of prompt and completion; None: min(the model's, 4096), less while memory is short
        expert_cache     "auto" (what memory leaves), experts per layer (12), or bytes ("6GB", "512MiB")
        prefetch         read experts that the next layer will probably need while this one waits: True, False, or "auto", which looks
                         ahead where that has made tokens faster. Tokens are the same
        preload          fill the expert cache before returning
        on_progress      called as on_progress(what, done, total)
        prefill_chunk    prompt tokens of one pass; None: 128, with experts up to 512 where there is memory for it
        expert_policy    which expert leaves a full cache first: "auto", or a name of eviction.POLICIES
        trace            file to write, anew: which experts each pass used (expert_trace.py); nothing for a dense model
        usage_history    file that remembers how often each expert was used (usage_history.py), or a folder with such a file for each model;
                         what it knows comes into memory first: with `preload` before this returns, else between the passes. It never
                         fails: see `remarks`
        pin              experts (layer, expert) that never leave memory once they are there; they come in before all others
        verify_experts   compare every expert that is read with its checksum; a wrong one is read again, then refused
        mirror           folder with the same model on another drive: experts are read from both, and from one when the other fails. What
                         is wrong with it is in `remarks` and `notices`, and never an error
        drive_settings   file that remembers how each drive is read fastest (drive_settings.py). A drive that it does not know is tested, in
                         under half a second, where experts have to be read from it again and again; None: no drive is. It never fails
        parts            replacements for tests

        Raises FormatError, ConfigError, MemoryBudgetError, TokenizerError, TemplateError; nothing stays open then.
        """
        path, mirror = Path(path), None if mirror is None else Path(mirror)
        _check_settings(threads, prefetch, prefill_chunk)
        budget = parse_budget(expert_cache)
        manifest = read_manifest(path)
        if manifest.kind != "decoder":
            raise FormatError(
                f"{path}: is a model of kind {manifest.kind!r} and makes embeddings; to generate text, open one of kind 'decoder'"
            )
        config = parse_config(manifest.config)
        check_files(path, manifest)
        pin = _checked_pins(pin, manifest)
        parts = parts or default_parts()
        threads, chunk = threads or usable_cores(), prefill_chunk or PREFILL_CHUNK_TOK
        plan = _plan(manifest, config, parts, budget, context_length, chunk, threads)
        if prefill_chunk is None and config.is_moe:
            chunk, plan = _longer_chunk(plan, lambda tokens: _plan(manifest, config, parts, budget, context_length, tokens, threads))
        engine = cls(path, manifest, config, plan, threads, chunk, parts)
        try:
            policy = DEFAULT_POLICY if expert_policy == "auto" else expert_policy
            drives = mirror, drive_settings
            options = _ExpertOptions(policy, preload, trace, verify_experts, *drives, usage_history, pin, _prefetch(prefetch))
            engine._load(on_progress, options)
            _refuse_another(path, manifest)
        except BaseException:
            engine.close()
            raise
        return engine

    def _load(self, on_progress: Progress | None, options: _ExpertOptions) -> None:
        with ThreadPoolExecutor(1) as pool:  # a vocabulary takes as long to parse as the weights to read
            loading = pool.submit(self._load_tokenizer)
            weights = load_weights(self.path, self.manifest, self.config, on_progress)
            loading.result()
        first = self._open_experts(on_progress, options) if self.config.is_moe else []
        self._useless_mirror = None if self.config.is_moe else options.mirror
        team = self.parts.team(self.threads)
        self._closing.callback(team.close)
        self._decoder = self.parts.decoder(
            self.config,
            weights,
            team,
            self.experts,
            context_length=self.context_length,
            max_chunk_tok=self.prefill_chunk,
            kv_dtype=kv_dtype(self.manifest),
            prefetch=None if self.experts is None or (options.preload and self.experts.holds_everything) else options.prefetch,
        )
        if self.experts is not None and first and not options.preload:  # last: nothing can fail any more
            self.warmer = CacheWarmer(self._lock, self.experts, first)
            self._closing.callback(self.warmer.stop)

    def _open_experts(self, on_progress: Progress | None, options: _ExpertOptions) -> list[Expert]:
        """Make the expert cache; returns who should come into it first."""
        # The system's copy of the files is a welcome second cache while all of it fits into what is left, and a burden otherwise.
        beyond_memory = self.plan.experts_total > self.plan.free
        known = KnownDrives(options.drive_settings) if options.drive_settings is not None and beyond_memory else None
        settings_for = None if known is None else lambda folder: known.settings_for(folder, self.manifest)
        how: dict[str, Any] = {"drop_page_cache": beyond_memory, "verify": options.verify, "mirror": options.mirror}
        self._store = store = ExpertStore(self.path, self.manifest, **how, settings_for=settings_for)
        self._drive_remarks = () if known is None else tuple(known.remarks)
        self._closing.callback(store.close)
        if options.trace is not None:
            self._trace = self._closing.enter_context(_open_trace(Path(options.trace), store))
        if options.usage_history is not None:
            self.usage = UsageHistory(history_file(options.usage_history, self.fingerprint), self.fingerprint, store.num_experts)
            self._closing.callback(self.usage.save)
        per_token = self.config.num_experts_per_tok
        watch = MemoryWatch() if can_give_back() else None
        budget, policy = self.plan.experts, options.policy
        self.experts = ExpertCache(store, budget, per_token, policy=policy, trace=self._trace, usage=self.usage, watch=watch)
        self.experts.pin(options.pins)
        first = [*sorted(options.pins), *(self.usage.usage.hottest_first() if self.usage is not None else ())]
        if options.preload:
            self.experts.preload(on_progress, first)
        return first

    def _load_tokenizer(self) -> None:
        if self.manifest.tokenizer is not None:
            self.tokenizer = self.parts.load_tokenizer(self.path, self.manifest.tokenizer)
            from .builtin_templates import builtin_template

            self.chat_template = self.parts.load_chat_template(self.path)
            if self.chat_template is None:
                self.chat_template = builtin_template(self.manifest.family, self.tokenizer, self.manifest.tokenizer)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know about how the model was opened, a sentence each."""
        found = []
        if self.chat_template is not None and (builtin := self.chat_template.builtin) is not None:
            found.append(f"the model has no chat template; conversations are written in the format {builtin!r}, as is usual for its kind")
        if self._useless_mirror is not None:
            found.append(f"mirror {self._useless_mirror}: the model is dense, so that nothing is read from it while it runs")
        found += () if self._store is None else self._store.remarks
        return (*found, *self._drive_remarks, *(self.usage.remarks if self.usage is not None else ()))

    @property
    def notices(self) -> tuple[str, ...]:
        """What happened since the model was opened that a user should know, a sentence each."""
        found = [] if self._trace is None or self._trace.remark is None else [self._trace.remark]
        experts = self.experts
        if experts is not None and (count := experts.stats.shrinks):
            times = "once" if count == 1 else f"{count} times"
            now, planned = size_text(experts.capacity_bytes), size_text(experts.capacity_bytes + experts.withdrawn_bytes)
            found.append(f"memory ran short: the expert cache gave some back {times} and has {now} of {planned} now")
        found += () if self._store is None else self._store.notices
        return (*found, *(self.usage.notices if self.usage is not None else ()))

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a text: the config's and the tokenizer's."""
        ids = set(self.config.eos_token_ids)
        if self.tokenizer is not None:
            ids.update(self.tokenizer.eos_token_ids)
        return frozenset(ids)

    @property
    def fingerprint(self) -> str:
        """Hash of weights and config: equal exactly when a session of one may be used with the other."""
        return self.manifest.fingerprint

    @property
    def expert_stats(self) -> ExpertStats:
        """Counters since the start; zeros for a dense model. Hits and misses are the decoder's count, preloading is neither."""
        if self.experts is None or self._decoder is None:
            return ExpertStats()
        layers = tuple((hits, misses) for hits, misses in self._decoder.layer_counters.tolist())
        hits, misses = (sum(counts) for counts in zip(*layers, strict=True))
        return replace(self.experts.stats, hits=hits, misses=misses, layers=layers)

    @property
    def drive_bytes_s(self) -> float:
        """The most bytes/s that reading experts has reached; 0 while none was read. The system's page cache counts, where it is used."""
        return 0.0 if self.experts is None else self.experts.drive_bytes_s

    def memory_bytes_s(self) -> float:
        """Bytes/s at which all threads together read the dense weights (memory_speed.py). Measured at the first call, in some 20 ms."""
        with self._lock:
            self._refuse_closed()
            if self._memory_bytes_s is None:
                self._memory_bytes_s = float(self._decoder.memory_speed())
            return self._memory_bytes_s

    def roofline(self, phase: PhaseStats) -> Roofline:
        """What share of the possible one phase of a generation of this engine reached."""
        return Roofline(phase, self.drive_bytes_s, self.memory_bytes_s())

    def new_session(self) -> Session:
        """An empty session with its own state. MemoryBudgetError when there is no memory for that."""
        return Session(self)

    def load_session(self, path: str | Path) -> Session:
        """The session that `Session.save` wrote to `path`."""
        return Session.load(self, path)

    def new_state(self) -> Any:
        """The state of one timeline of `context_length` positions."""
        self._refuse_closed()
        needed = self.parts.state.bytes_for(self.config.states, self.context_length, self.prefill_chunk, kv_dtype(self.manifest))
        available = available_memory()
        if needed > available:
            raise MemoryBudgetError(
                f"a session needs {size_text(needed)} for a context of {self.context_length} tokens, {size_text(available)} are free: "
                "open the model with a shorter context, or drop other sessions"
            )
        return self._decoder.new_state(self.context_length)

    def forward(
        self, state: Any, token_ids: Sequence[int], logits: str = "last", cancel: threading.Event | None = None
    ) -> Pass:  # fmt: skip
        """Append `token_ids` to `state`. One pass at a time over all threads, first come, first served.

        logits   "none", "last" -> float32 (V,), "all" -> float32 (T, V); at most `prefill_chunk` tokens a call
        cancel   ends a pass over several tokens, or one that waits for experts, with PassCancelled
        """
        ids = np.asarray(token_ids, np.int64)
        with self._lock:
            self._refuse_closed()
            before, started = self.expert_stats, time.perf_counter()
            result = self._decoder.forward(state, ids, logits=logits, cancel=cancel)
            seconds, experts = time.perf_counter() - started, self.expert_stats - before
            return Pass(result, seconds, experts, self._computed_bytes(state, logits, experts))

    def _computed_bytes(self, state: Any, logits: str, experts: ExpertStats) -> int:
        """`Pass.computed_bytes` of the pass that has just ended. A layer asks for an expert once in a pass, for however many tokens."""
        chosen = sum(entry.expert_bytes * sum(experts.layers[layer]) for layer, entry in self.manifest.experts.items() if experts.layers)
        return int(self._decoder.dense_bytes(logits) + state.seen_bytes + chosen)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ColibriError("the engine is closed: open the model again")

    def close(self) -> None:
        """End the threads, close the files and let go of the weights. A pass in flight ends first; sessions are unusable afterwards."""
        with self._lock:
            self._closed = True
            self._closing.close()
            self._decoder = self.experts = None
        if self.warmer is not None:
            self.warmer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_trace(path: Path, store: ExpertStore) -> TraceWriter:
    try:
        return TraceWriter(path, store.expert_bytes, store.num_experts)
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be written ({error.strerror}); give a path in a folder that can be") from error


def _refuse_another(path: Path, manifest: Manifest) -> None:
    """A conversion may have put another model in the place of one that was half opened."""
    if read_manifest(path).fingerprint != manifest.fingerprint:
        raise FormatError(f"{path}: was replaced by another model while it was opened: open it again")


def _checked_pins(pin: Iterable[Expert], manifest: Manifest) -> frozenset[Expert]:
    pins = frozenset((int(layer), int(expert)) for layer, expert in pin)
    if pins and not manifest.experts:
        raise ConfigError("this model has no experts to pin: it is dense")
    check_pins(pins, {layer: entry.num_experts for layer, entry in manifest.experts.items()})
    return pins


def _check_settings(threads: int | None, prefetch: str | bool, prefill_chunk: int | None) -> None:
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS):
        raise ConfigError(f"threads={threads!r}: expected 1 to {MAX_THREADS}, or none for the physical cores")
    if prefetch not in ("auto", "on", "off", True, False):
        raise ConfigError(f"prefetch={prefetch!r}: expected 'auto', True or False")
    if prefill_chunk is not None and (isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int) or prefill_chunk < 1):
        raise ConfigError(f"prefill_chunk={prefill_chunk!r}: expected at least 1 token")


def _prefetch(setting: str | bool) -> Prefetch | None:
    if isinstance(setting, bool):
        setting = "on" if setting else "off"
    return None if setting == "off" else Prefetch(setting)


def kv_dtype(manifest: Manifest) -> type:
    """Number type of keys and values: float32 for a model in float32, else float16."""
    entry = manifest.tensors.get("model.embed_tokens.weight")
    return np.float32 if entry is not None and entry.type == "f32" else np.float16


def _longer_chunk(plan: MemoryPlan, plan_for: Callable[[int], MemoryPlan]) -> tuple[int, MemoryPlan]:
    """The longest chunk that takes no more than a tenth of the experts' memory, and the plan with it.

    Every chunk of a prompt reads most experts that are not in memory, so half as many chunks read half as much; and an expert's weights
    are computed with twice as many tokens at a time.
    """
    chunk = MOE_CHUNK_TOK
    while chunk > PREFILL_CHUNK_TOK:
        try:
            longer = plan_for(chunk)
        except MemoryBudgetError:
            longer = None
        if longer is not None and longer.experts >= 0.9 * plan.experts and longer.context_length == plan.context_length:
            return chunk, longer
        chunk //= 2
    return PREFILL_CHUNK_TOK, plan


def _vocabulary_bytes(manifest: Manifest, config: ModelConfig) -> int:
    return 0 if manifest.tokenizer is None else VOCABULARY_BYTES + TOKEN_BYTES * config.vocab_size


def _plan(
    manifest: Manifest, config: ModelConfig, parts: Parts, budget: CacheBudget, context_length: int | None, chunk: int, threads: int
) -> MemoryPlan:
    """The memory plan of this model on this machine, from sizes alone."""
    expert_bytes = {layer: entry.expert_bytes for layer, entry in manifest.experts.items()}
    needs = Needs(
        dense=dense_bytes(manifest),
        expert_bytes=expert_bytes,
        num_experts={layer: entry.num_experts for layer, entry in manifest.experts.items()},
        floor=floor_bytes(expert_bytes, config.num_experts_per_tok),
        runtime=resident_bytes() + KERNEL_BYTES + _vocabulary_bytes(manifest, config),
    )
    available = max(0, available_memory() + resident_bytes() - SPARE_BYTES)

    def kv_of(length: int) -> int:
        return int(parts.state.bytes_for(config.states, length, min(chunk, length), kv_dtype(manifest)))

    def activations_of(length: int) -> int:
        return int(parts.decoder.activation_bytes(config, min(chunk, length), length, threads))

    length = choose_context(context_length, config.max_context_length, lambda n: kv_of(n) + activations_of(n), needs, available)
    plan = plan_memory(needs, budget, kv_of(length), activations_of(length), length, available)
    if config.is_moe:
        check_floor(plan.experts, expert_bytes, config.num_experts_per_tok)
    return plan
