"""Decode and prefill speed beside llama.cpp, interleaved in one run.

    python benchmarks/speed.py MODEL.gguf MODEL_DIR --peer-python PYTHON [--threads 2] [--rounds 5] [--csv benchmarks/results/speed.csv]

In:  a GGUF file, the model directory made from it, a Python that has llama-cpp-python
Out: per round and at the end tok/s of both and the ratio colibri / llama.cpp (medians), appended to a CSV with commit and machine

Both engines are separate processes that wait for their turn; each turn is one prefill of 512 tokens and 32 decoded tokens.
"""

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import sys
from pathlib import Path

OURS = """
import sys, time, numpy as np
from libcolibri import Engine
with Engine.open(sys.argv[1], threads=int(sys.argv[2]), context_length=1024) as engine:
    ids = [int(i) for i in np.random.default_rng(0).integers(0, engine.config.vocab_size - 300, 512)]
    print("ready", flush=True)
    chunk = engine.prefill_chunk
    for line in sys.stdin:
        kv = engine.new_state()
        start = time.perf_counter()
        for at in range(0, 512, chunk):
            logits = engine.forward(kv, ids[at : at + chunk]).logits
        token = int(logits.argmax())
        prefilled = time.perf_counter()
        for _ in range(32):
            token = int(engine.forward(kv, [token]).logits.argmax())
        print(512 / (prefilled - start), 32 / (time.perf_counter() - prefilled), flush=True)
"""

PEER = """
import sys, time, numpy as np
from llama_cpp import Llama
n = int(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=1024, n_batch=512, n_threads=n, n_threads_batch=n, verbose=False)
ids = [int(i) for i in np.random.default_rng(0).integers(0, model.n_vocab() - 300, 512)]
print("ready", flush=True)
for line in sys.stdin:
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    token = model.sample(temp=0)
    prefilled = time.perf_counter()
    for _ in range(32):
        model.eval([token])
        token = model.sample(temp=0)
    print(512 / (prefilled - start), 32 / (time.perf_counter() - prefilled), flush=True)
"""


class Runner:
    """A process that measures once for every line it is given."""

    def __init__(self, python: str, code: str, model: str, threads: int):
        command = [python, "-c", code, model, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == "ready", f"{python} did not start"

    def measure(self) -> tuple[float, float]:
        """Prefill and decode speed, tok/s."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        prefill, decode = self.process.stdout.readline().split()
        return float(prefill), float(decode)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def machine() -> str:
    """Processor name and core count."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names) or '?'} cores"


def append(path: Path, row: dict) -> None:
    """Add a row to the CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "speed.csv")
    args = parser.parse_args()
    ours = Runner(sys.executable, OURS, args.model, args.threads)
    peer = Runner(args.peer_python, PEER, args.gguf, args.threads)
    ours.measure(), peer.measure()  # warm-up
    rounds = []
    for number in range(args.rounds):
        a, b = ours.measure(), peer.measure()
        rounds.append((*a, *b))
        pairs = (f"{name} {x:.1f} / {y:.1f} = {x / y:.2f}" for name, x, y in zip(("prefill", "decode"), a, b, strict=True))
        print(f"round {number + 1}:", ", ".join(pairs))
    ours.close(), peer.close()
    from libcolibri.simd.isa import best

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    row = {
        "date": datetime.date.today().isoformat(), "commit": commit, "machine": machine(), "isa": best().name,
        "model": Path(args.gguf).name, "threads": args.threads,
    }  # fmt: skip
    for i, name in enumerate(("prefill_tok_s", "decode_tok_s", "peer_prefill_tok_s", "peer_decode_tok_s")):
        row[name] = round(statistics.median(r[i] for r in rounds), 2)
    row["prefill_ratio"] = round(statistics.median(r[0] / r[2] for r in rounds), 3)
    row["decode_ratio"] = round(statistics.median(r[1] / r[3] for r in rounds), 3)
    print(f"median ratios, colibri / llama.cpp: prefill {row['prefill_ratio']}, decode {row['decode_ratio']}")
    append(args.csv, row)


if __name__ == "__main__":
    main()
