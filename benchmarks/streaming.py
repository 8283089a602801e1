"""A model that is bigger than memory, beside llama.cpp and its kin: prefill of 512 tokens and decode, cold, under a memory limit.

    python benchmarks/streaming.py MODEL_DIR MODEL.gguf --limit 8G [--peer "NAME=LLAMA_BENCH OPTIONS" ...] [--rounds 5]
                                   [--prompt 512] [--decode 64] [--settings prefetch=off,expert_policy=lru ...] [--no-resident] [--csv FILE]

In:  a model directory and the GGUF file that it was made from; llama-bench programs that were built for this processor
Out: per round and at the end tok/s of everybody and ratios (medians), the share of the streaming roofline, whether all settings gave the
     same tokens; appended to a CSV with commit and machine

Needs root and Linux: the limit is a control group's, which counts the page cache too, and the page cache is dropped before every run.
Everybody takes turns in every round, because drives change their speed from one minute to the next. A peer maps its file and runs once with
the drives' own read-ahead and once with 128 kB; the better one counts. It is asked for random tokens, as here. Its options should
switch off what would not be cold or not mapped: `--repack 0 -lm mmap --no-warmup`, or `-mmp 1 -w 0`.

Before a run as much memory as it may use is written once and freed: a virtual machine whose host took unused memory back would hand it out
again at half a GB/s, which was 12 of a prompt's 16 seconds of processor time here, and which no machine of one's own does.

The streaming roofline of decode is the larger of two times per token: the bytes that Belady's optimum would have to read with the same
cache for the same choices of experts, at the speed of the drive right before and after the run; and the time of a token when every
expert is in memory, of a run of its own without a limit. Nobody who does not know the future reads as little as the optimum.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from speed import append, machine

from libcolibri.arena import allocate
from libcolibri.cache_simulator import OPTIMUM, simulate
from libcolibri.expert_trace import read_trace
from libcolibri.format import read_manifest

SCRIPT = Path(__file__)
READ_AHEAD_KB = 128
TOUCHED_BYTES = 18 << 30  # without a limit
TOUCH = "import sys, numpy; numpy.ones(int(sys.argv[1]), numpy.uint8)"
SAMPLE_BYTES, BLOCK_BYTES, READ_THREADS = 768 << 20, 2 << 20, 4


def run_ours(model: str, facts: dict) -> None:
    """In a process of its own: one cold prompt, then decode of random tokens; prints what it found as JSON."""
    import zlib

    from libcolibri import Engine

    options = {name: value for name, value in facts["options"].items() if value is not None}
    prompt = facts["prompt"]
    started = time.perf_counter()
    with Engine.open(model, context_length=1024, trace=facts["trace"], **options) as engine:
        opened = time.perf_counter()
        ids = np.random.default_rng(0).integers(0, engine.config.vocab_size - 300, prompt + facts["decode"]).tolist()
        state, chunk = engine.new_state(), engine.prefill_chunk
        for at in range(0, prompt, chunk):
            logits = engine.forward(state, ids[at : min(at + chunk, prompt)]).logits
        prefilled, after_prompt, likeliest = time.perf_counter(), engine.expert_stats, []
        for token in ids[prompt:]:
            likeliest.append(int(logits.argmax()))
            logits = engine.forward(state, [token]).logits
        decode_s, done = time.perf_counter() - prefilled, engine.expert_stats - after_prompt
        found = {
            "open_s": opened - started,
            "prefill_tok_s": prompt / (prefilled - opened),
            "decode_tok_s": facts["decode"] / decode_s,
            "hit_rate": done.hit_rate,
            "prompt_bytes": after_prompt.read_bytes,
            "tok_bytes": done.read_bytes / facts["decode"],
            "wait_share": done.wait_s / decode_s,
            "prefetched": done.prefetched,
            "prefetch_used": done.prefetch_used,
            "cache_bytes": engine.expert_stats.capacity_bytes,
            "planned_bytes": engine.plan.total,
            "peak_bytes": _peak_bytes(),
            "tokens": f"{zlib.crc32(np.array(likeliest).tobytes()):08x}",
        }
    print(json.dumps(found), flush=True)


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[Path | None]:
    """A control group with that limit, removed at the end; None for no limit."""
    if limit_bytes is None:
        yield None
        return
    root = Path("/sys/fs/cgroup")
    old = root / "memory" / "memory.limit_in_bytes"
    parent, name = (root / "memory", old.name) if old.is_file() else (root, "memory.max")
    group = parent / f"colibri-streaming-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        if name == "memory.max" and (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


@contextlib.contextmanager
def read_ahead(kb: int | None) -> Iterator[None]:
    """The drives' read-ahead, put back at the end; None: as it is."""
    files = [file for file in Path("/sys/block").glob("*/queue/read_ahead_kb") if not file.parts[3].startswith(("loop", "ram", "zram"))]
    before = {file: file.read_text() for file in files} if kb is not None else {}
    try:
        for file in before:
            file.write_text(str(kb))
        yield
    finally:
        for file, value in before.items():
            file.write_text(value)


def cold(command: list[str], limit_bytes: int | None) -> str:
    """Output of a command that begins with nothing of any file in memory, under a limit; RuntimeError when it fails."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    subprocess.run([sys.executable, "-c", TOUCH, str((limit_bytes or TOUCHED_BYTES) + (1 << 30))], check=False)
    with memory_group(limit_bytes) as group:
        enter = f"echo $$ > {group}/cgroup.procs; " if group is not None else ""
        done = subprocess.run(["sh", "-c", f'{enter}exec "$@"', "sh", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit {done.returncode}: {done.stderr[-300:]}")
    return done.stdout


class Ours:
    """One setting of this library."""

    def __init__(self, model: Path, setting: str, prompt: int, decode: int):
        self.model, self.prompt, self.decode, self.name = model, prompt, decode, setting or "auto"
        pairs = (pair.split("=", 1) for pair in setting.split(",") if pair)
        self.options = {name: int(value) if value.isdigit() else value for name, value in pairs}

    def measure(self, limit_bytes: int | None, **more: object) -> dict:
        """One cold run, with bytes per token of Belady's optimum for the same choices and cache."""
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            facts = {"options": self.options | more, "prompt": self.prompt, "decode": self.decode, "trace": str(trace)}
            found = json.loads(cold([sys.executable, str(SCRIPT), "--child", json.dumps(facts), str(self.model), "-"], limit_bytes))
            recorded = read_trace(trace)
            prompt_passes = len(recorded.passes) - self.decode
            optimum = simulate(recorded, OPTIMUM, found["cache_bytes"], warm_up_passes=prompt_passes)
            touched = [set().union(*(done.experts[row] for done in recorded.passes[:prompt_passes])) for row in range(len(recorded.layers))]
            found["touched_bytes"] = sum(len(experts) * size for experts, size in zip(touched, recorded.expert_bytes, strict=True))
        return found | {"optimum_tok_bytes": optimum.read_bytes / self.decode}


class Peer:
    """A llama-bench program, with the options that it needs for a cold run from a mapped file."""

    def __init__(self, name: str, command: str, gguf: Path, threads: int, prompt: int, decode: int):
        self.name, self.prompt, self.decode = name, prompt, decode
        wanted = ["-m", str(gguf), "-t", str(threads), "-p", str(prompt), "-n", str(decode), "-r", "1", "-o", "json"]
        self.command = shlex.split(command) + wanted

    def measure(self, limit_bytes: int | None) -> tuple[float, float]:
        """tok/s of prefill and decode: of each, the better of two read-aheads."""
        found = [self._run(limit_bytes, kb) for kb in (None, READ_AHEAD_KB)]
        return max(prefill for prefill, _ in found), max(decode for _, decode in found)

    def _run(self, limit_bytes: int | None, read_ahead_kb: int | None) -> tuple[float, float]:
        with read_ahead(read_ahead_kb):
            output = cold(self.command, limit_bytes)
        speeds = {test["n_gen"]: test["avg_ts"] for test in json.loads(output[output.index("[") :])}  # a prompt generates 0 tokens
        prefill, decode = speeds[0], speeds[self.decode]
        print(f"  {self.name}, read-ahead {read_ahead_kb or 'as it is'}: {prefill:.2f} and {decode:.2f} tok/s", flush=True)
        return prefill, decode


class DriveProbe:
    """Speed of the drive that a model lies on: large reads at random places, several at once, around the page cache."""

    def __init__(self, model: Path):
        self.paths = [model / entry.file for entry in read_manifest(model).experts.values()]
        self.memory = [allocate(BLOCK_BYTES, "a block") for _ in range(READ_THREADS)]

    def bytes_s(self) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(self._read, range(READ_THREADS)))
        return SAMPLE_BYTES / (time.perf_counter() - started)

    def _read(self, number: int) -> None:
        rng = random.Random()
        for _ in range(SAMPLE_BYTES // BLOCK_BYTES // READ_THREADS):
            path = rng.choice(self.paths)
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(file, [self.memory[number]], rng.randrange(path.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES)
            finally:
                os.close(file)


def one_round(settings: list[Ours], peers: list[Peer], drive: DriveProbe, limit_bytes: int, resident_s: float) -> dict[str, dict]:
    """What everybody reached, by name."""
    found: dict[str, dict] = {}
    for ours in settings:
        before = drive.bytes_s()
        one = ours.measure(limit_bytes)
        one["drive_bytes_s"] = (before + drive.bytes_s()) / 2
        possible_s = max(one["optimum_tok_bytes"] / one["drive_bytes_s"], resident_s)
        shares = {"drive_share": one["tok_bytes"] * one["decode_tok_s"] / one["drive_bytes_s"]}
        found[ours.name] = one | shares | {"roofline": possible_s * one["decode_tok_s"]}
    for peer in peers:
        prefill, decode = peer.measure(limit_bytes)
        found[peer.name] = {"prefill_tok_s": prefill, "decode_tok_s": decode}
    return found


def text(name: str, one: dict) -> str:
    line = f"{name}: prefill {one['prefill_tok_s']:.2f}, decode {one['decode_tok_s']:.2f} tok/s"
    if "hit_rate" not in one:
        return line
    twice = one["prompt_bytes"] / max(1, one["touched_bytes"])
    return (
        f"{line}; opened in {one['open_s']:.2f} s, prompt read {one['prompt_bytes'] / 1e9:.2f} GB ({twice:.3f} of the experts touched), "
        f"hit rate {one['hit_rate']:.3f}, {one['tok_bytes'] / 1e6:.0f} MB/token (optimum {one['optimum_tok_bytes'] / 1e6:.0f}), "
        f"waited {one['wait_share']:.0%}, drive {one['drive_bytes_s'] / 1e9:.2f} GB/s, used {one['drive_share']:.0%} of it, "
        f"roofline {one['roofline']:.0%}, peak {one['peak_bytes'] / one['planned_bytes']:.3f} of the plan, tokens {one['tokens']}"
    )


NUMBERS = ("prefill_tok_s", "decode_tok_s", "hit_rate", "tok_bytes", "optimum_tok_bytes", "drive_bytes_s", "drive_share", "roofline")


def report(rounds: list[dict[str, dict]], peers: list[Peer], facts: dict, path: Path) -> None:
    """Medians over the rounds, printed and appended; ratios are those of each round."""
    for name in rounds[0]:
        everything = [one[name] for one in rounds]
        row = facts | {"who": name, "rounds": len(rounds)}
        for key in NUMBERS:
            row[key] = round(statistics.median(one[key] for one in everything), 3) if key in everything[0] else ""
        for what in ("prefill", "decode"):
            key = f"{what}_tok_s"
            better = [one[name][key] / max(one[peer.name][key] for peer in peers) for one in rounds] if peers else []
            row[f"{what}_ratio"] = round(statistics.median(better), 3) if better else ""
        print(", ".join(f"{key} {value}" for key, value in row.items() if key not in facts and value != ""))
        append(path, row)
    tokens = {one["tokens"] for done in rounds for one in done.values() if "tokens" in one}
    print("tokens: the same in every run" if len(tokens) == 1 else f"tokens DIFFER: {sorted(tokens)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--limit", default="8G", help="as numfmt reads it, powers of 1024")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="a llama-bench and its options")
    parser.add_argument(
        "--settings", action="append", metavar="NAME=VALUE,...", help="arguments of Engine.open; may be repeated; none: as they are"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens after it")
    parser.add_argument("--threads", type=int, default=2, help="of the peers; ours takes the physical cores")
    parser.add_argument("--no-resident", action="store_true", help="no run without a limit: the roofline is the drive's alone")
    parser.add_argument("--csv", type=Path, default=SCRIPT.parent / "results" / "streaming.csv")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.child:
        run_ours(str(args.model), json.loads(args.child))
        return
    limit_bytes = int(args.limit[:-1]) << {"M": 20, "G": 30}[args.limit[-1].upper()]
    settings = [Ours(args.model, setting, args.prompt, args.decode) for setting in args.settings or [""]]
    peers = [Peer(*peer.split("=", 1), args.gguf, args.threads, args.prompt, args.decode) for peer in args.peer]
    drive, rounds, resident_s = DriveProbe(args.model), [], 0.0
    if not args.no_resident:
        resident_s = 1 / Ours(args.model, "", args.prompt, args.decode).measure(None, preload=True)["decode_tok_s"]
        print(f"every expert in memory: decode {1 / resident_s:.2f} tok/s", flush=True)
    for number in range(args.rounds):
        rounds.append(one_round(settings, peers, drive, limit_bytes, resident_s))
        for name, one in rounds[-1].items():
            print(f"round {number + 1}: {text(name, one)}", flush=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    facts = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": machine(), "model": args.model.name}
    facts |= {"prompt": args.prompt, "limit": args.limit, "resident_tok_s": round(1 / resident_s, 2) if resident_s else ""}
    report(rounds, peers, facts, args.csv)


if __name__ == "__main__":
    main()
