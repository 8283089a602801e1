"""How fast the expert store reads, beside as many plain reads of the same bytes at a time.

    python benchmarks/store.py MODEL_DIR [--mirror FOLDER] [--experts 8] [--megabytes 1500] [--rounds 5]
                               [--drive-settings FILE] [--csv benchmarks/results/store.csv]

In:  a model directory with experts, maybe a second copy of it
Out: per round and at the end (medians) bytes/s of both and the ratio store / plain, appended to a CSV with commit and machine

Both read the same random experts of random layers, around the page cache, `--experts` of a layer at once and the next ones while these are
waited for; they take turns, each first in every other round, because drives change their speed from one moment to the next. Plain reading
is a loop of preadv in as many threads as the store has for the model's own drive, over the same pieces, each into memory of its own.
"""

import argparse
import datetime
import os
import queue
import random
import statistics
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
from speed import append, machine

from libcolibri.arena import allocate
from libcolibri.drive_settings import KnownDrives
from libcolibri.expert_store import ExpertStore
from libcolibri.file_reader import FileReader
from libcolibri.format import expert_offsets, read_manifest

Batch = tuple[int, list[int]]  # layer, experts


def batches(store: ExpertStore, n_experts: int, n_bytes: int) -> list[Batch]:
    """Random experts, n_experts of a random layer at a time, of n_bytes or somewhat more."""
    found: list[Batch] = []
    while n_bytes > 0:
        layer = random.choice(list(store.num_experts))
        experts = random.sample(range(store.num_experts[layer]), min(n_experts, store.num_experts[layer]))
        found.append((layer, experts))
        n_bytes -= len(experts) * store.expert_bytes[layer]
    return found


def by_store(store: ExpertStore, work: list[Batch], memory: np.ndarray) -> float:
    """Seconds that the store takes, two batches under way at a time."""
    started, under_way = time.perf_counter(), []
    for number, (layer, experts) in enumerate(work):
        half = memory[number % 2]
        under_way.append(store.start(layer, experts, [half[i, : store.expert_bytes[layer]] for i in range(len(experts))]))
        if len(under_way) == 2:
            under_way.pop(0).wait()
    for reading in under_way:
        reading.wait()
    return time.perf_counter() - started


class PlainReads:
    """Threads that do nothing but preadv, two batches under way at a time."""

    def __init__(self, paths: dict[int, Path], offsets: dict[int, list[int]], threads: int, piece_bytes: int, direct: bool):
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        self._files = {layer: os.open(path, flags) for layer, path in paths.items()}
        self._offsets, self._piece_bytes, self._pieces = offsets, piece_bytes, queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            file, view, offset, done = self._pieces.get()
            while view:
                count = os.preadv(file, [view], offset)
                view, offset = view[count:], offset + count
            done.release()

    def read(self, store: ExpertStore, work: list[Batch], memory: np.ndarray) -> float:
        """Seconds for the same work."""
        started, under_way = time.perf_counter(), []
        for number, (layer, experts) in enumerate(work):
            done, count, size = threading.Semaphore(0), 0, store.expert_bytes[layer]
            for i, expert in enumerate(experts):
                for at in range(0, size, self._piece_bytes):
                    view = memoryview(memory[number % 2, i, at : min(at + self._piece_bytes, size)])
                    self._pieces.put((self._files[layer], view, self._offsets[layer][expert] + at, done))
                    count += 1
            under_way.append((done, count))
            if len(under_way) == 2:
                self._wait(*under_way.pop(0))
        for batch in under_way:
            self._wait(*batch)
        return time.perf_counter() - started

    @staticmethod
    def _wait(done: threading.Semaphore, count: int) -> None:
        for _ in range(count):
            done.acquire()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drive-settings", type=Path)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "store.csv")
    args = parser.parse_args()
    manifest = read_manifest(args.model)
    known = None if args.drive_settings is None else KnownDrives(args.drive_settings)
    settings_for = None if known is None else lambda folder: known.settings_for(folder, manifest)
    store = ExpertStore(args.model, manifest, drop_page_cache=True, mirror=args.mirror, settings_for=settings_for)
    settings = store.settings
    offsets = {layer: expert_offsets(args.model, manifest, layer) for layer in manifest.experts}
    paths = {layer: args.model / entry.file for layer, entry in manifest.experts.items()}
    direct = FileReader(next(iter(paths.values())), direct=settings.direct).direct  # where the file system can do that
    plain = PlainReads(paths, offsets, settings.threads, settings.piece_bytes, direct)
    largest = max(store.expert_bytes.values())
    memory = allocate(2 * args.experts * largest, "the benchmark").reshape(2, args.experts, largest)
    memory.fill(1)
    work = batches(store, args.experts, 200_000_000)
    by_store(store, work, memory), plain.read(store, work, memory)  # warm-up
    rounds = []
    for number in range(args.rounds):
        work = batches(store, args.experts, args.megabytes * 10**6)
        n_bytes = sum(len(experts) * store.expert_bytes[layer] for layer, experts in work)
        runs = [lambda work=work: by_store(store, work, memory), lambda work=work: plain.read(store, work, memory)]
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {i: runs[i]() for i in order}
        rounds.append((n_bytes / seconds[0] / 1e9, n_bytes / seconds[1] / 1e9))
        print(f"round {number + 1}: store {rounds[-1][0]:.2f} GB/s, plain {rounds[-1][1]:.2f} GB/s = {rounds[-1][0] / rounds[-1][1]:.3f}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    row = {
        "date": datetime.date.today().isoformat(), "commit": commit, "machine": machine(), "model": args.model.name,
        "mirror": args.mirror is not None, "experts": args.experts, "direct": direct, "threads": settings.threads,
        "piece_bytes": settings.piece_bytes, "store_gb_s": round(statistics.median(r[0] for r in rounds), 3),
        "plain_gb_s": round(statistics.median(r[1] for r in rounds), 3), "ratio": round(statistics.median(r[0] / r[1] for r in rounds), 3),
    }  # fmt: skip
    print(f"medians: store {row['store_gb_s']} GB/s, plain {row['plain_gb_s']} GB/s, ratio {row['ratio']}")
    append(args.csv, row)
    store.close()


if __name__ == "__main__":
    main()
