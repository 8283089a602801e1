"""The AVX-512 VNNI path on processors that lack it: its machine code is inspected, its arithmetic is run with the instructions replaced.

What this cannot show is the instructions themselves; on a processor that has them, test_dots.py runs them and compares bits.
"""

import os
import platform
import re
import subprocess
import sys

import numpy as np
import pytest

from libcolibri.kernels import jit
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.simd import dot
from libcolibri.simd.isa import Isa
from tests.kernels import test_dots

COMPILE = """
from libcolibri.kernels import jit
jit.cache_directory = lambda: None
from libcolibri.kernels import dots, matrix
for name in ("q4_k", "q8_0", "mxfp4"):
    print(matrix.make_product(2, dots.IDS[name], 8, 16)._library.get_asm_str())
"""


def test_vnni_kernels_use_the_instruction_on_whole_registers():
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return  # LLVM cannot be asked for x86 code here
    environment = {**os.environ, "NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True)
    dots = re.findall(r"vpdpbusd\s.*", done.stdout)
    assert len(dots) > 50
    assert all("zmm" in line for line in dots)
    assert "vpmaddubsw" not in done.stdout
    assert re.search(r"vpshufb\s.*zmm", done.stdout)  # mxfp4's values


@pytest.mark.parametrize("type", test_dots.QUANTISED)
def test_vnni_arithmetic_gives_the_same_bits(type, monkeypatch):
    """Shifted codes, corrections and scales of the VNNI path, computed with plain integers in place of its instructions."""
    monkeypatch.setattr(jit, "cache_directory", lambda: None)  # these kernels must never be found by a real VNNI machine
    monkeypatch.setattr(dot, "_vnni", lambda b, total, codes, x: dot._plain_dot4(b, total, codes, x, signed=False))
    monkeypatch.setattr(dot, "_pairs_to_i32_512", dot._plain_dot2)
    monkeypatch.setattr(dot, "_shuffle_bytes", lambda b, table, indices, name, bits: dot._select_bytes(b, table, indices))
    monkeypatch.setitem(test_dots.KERNELS, Isa.AVX512_VNNI, KernelSet(Isa.AVX512_VNNI))
    matrix, _ = test_dots.matrix_of(type, 40, 512, seed=7)
    x = np.random.default_rng(8).standard_normal((11, 512)).astype(np.float32)
    got, reference = test_dots.multiply(matrix, x, Isa.AVX512_VNNI), test_dots.multiply(matrix, x, Isa.GENERIC)
    assert (got.view(np.uint32) == reference.view(np.uint32)).all()
