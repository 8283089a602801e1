"""Check and time real embedding models: cosines against a reference, milliseconds a text.

    python benchmarks/embeddings.py MODEL_DIR [--threads N] [--reference tests/fixtures/embedding_reference.npz]

MODEL_DIR is made by colibri-convert. A reference holds `texts` and `embeddings` (N, D), and may hold token ids `ids.0`, `ids.1`, ...;
texts are embedded as they stand, without a prefix. make_embedding_reference.py makes the one for all-MiniLM-L6-v2.
"""

import argparse
import time

import numpy as np

from libcolibri.encoder import EncodedText, Encoder

LENGTHS = (32, 200, 512)
REPEATS = 20


def check(encoder: Encoder, path: str) -> None:
    """Print how many token ids agree, and the cosines."""
    with np.load(path) as file:
        reference = dict(file)
    texts = [str(text) for text in reference["texts"]]
    wanted = {i: reference[f"ids.{i}"].tolist() for i in range(len(texts)) if f"ids.{i}" in reference}
    same = sum(list(encoder.encode(texts[i]).ids) == ids for i, ids in wanted.items())
    cosines = (encoder.embed(texts) * reference["embeddings"]).sum(-1)
    print(f"token ids equal: {same} of {len(wanted)}; cosine: least {cosines.min():.5f}, median {np.median(cosines):.5f}")


def measure(encoder: Encoder, n_tok: int) -> None:
    """Print the time of one text, and of many in one call, of n_tok tokens each."""
    rng = np.random.default_rng(0)
    first, *_, last = encoder.encode("x").ids
    body = rng.integers(1000, encoder.config.vocab_size - 1000, (32, n_tok - 2))
    texts = [EncodedText((first, *row, last)) for row in body.tolist()]
    encoder.embed_encoded(texts[:2])
    single = min(_timed(encoder, texts[:1]) for _ in range(REPEATS))
    many = min(_timed(encoder, texts) for _ in range(3)) / len(texts)
    print(f"{n_tok} tok, {encoder.threads} threads: {single * 1e3:.1f} ms alone, {many * 1e3:.1f} ms in a batch, {1 / many:.0f} texts/s")


def _timed(encoder: Encoder, texts: list[EncodedText]) -> float:
    started = time.perf_counter()
    encoder.embed_encoded(texts)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--reference")
    arguments = parser.parse_args()
    started = time.perf_counter()
    with Encoder.open(arguments.model_dir, arguments.threads) as encoder:
        opened_s = time.perf_counter() - started
        print(f"{arguments.model_dir}: {encoder.config.family}, {encoder.dimension} dimensions, opened in {opened_s:.2f} s")
        if arguments.reference:
            check(encoder, arguments.reference)
        for n_tok in LENGTHS:
            if n_tok <= encoder.max_tok:
                measure(encoder, n_tok)


if __name__ == "__main__":
    main()
