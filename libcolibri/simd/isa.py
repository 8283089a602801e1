"""Instruction sets, as plain integers that a kernel's factory closes over.

A kernel is compiled for one of these; several can live in one process, which is how tests compare their bits. Every
operation but the integer dot product is generic LLVM vector code, so another instruction set needs an entry here and
a branch in `dot.py`, nothing else.
"""

from enum import IntEnum

import llvmlite.binding as llvm


class Isa(IntEnum):
    """GENERIC runs wherever LLVM does; the others use the instructions named."""

    GENERIC = 0
    AVX2 = 1
    AVX512_VNNI = 2


_REQUIRED_FEATURES = {
    Isa.GENERIC: (),
    Isa.AVX2: ("avx2", "fma", "f16c"),
    Isa.AVX512_VNNI: ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"),
}


def available() -> list[Isa]:
    """The instruction sets that this processor has, best last."""
    features = llvm.get_host_cpu_features()
    return [isa for isa, needed in _REQUIRED_FEATURES.items() if all(features.get(name, False) for name in needed)]


def best() -> Isa:
    """The fastest instruction set of this processor."""
    return available()[-1]
