"""Rows of an embedding, of every tensor type, bit for bit what the type's tiles stand for."""

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.matrix import Matrix
from libcolibri.quant import FORMATS
from libcolibri.recorder import Recorder, Rows
from libcolibri.thread_team import Team
from tests.random_blocks import random_blocks


@pytest.mark.parametrize("type", FORMATS)
def test_rows_are_the_dequantised_ones(type):
    fmt = FORMATS[type]
    blocks = random_blocks(type, 35, 512 // fmt.block_cols, np.random.default_rng(6))
    if type == "mxfp4":
        blocks[0, :3, 0] = 0, 1, 2  # scales below and at the smallest normal float32
    tiles = fmt.pack(blocks)
    ids = np.array([0, 34, 15, 16, 3, 0], np.int64)
    out = Rows(len(ids), 512)
    recorder = Recorder(KernelSet(), 2, len(ids), np.array([len(ids)], np.int64), 4096)
    recorder.embed("embed", Matrix(type, 35, 512, tiles), ids, out)
    team = Team(2)
    try:
        team.run(recorder.program.finish())
    finally:
        team.close()
    assert out.data[:, :512].tobytes() == fmt.dequantize(tiles, 35, 512)[ids].tobytes()
