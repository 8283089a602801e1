"""Kernels by what they do, compiled when first asked for."""

import threading
from collections.abc import Callable

from ..simd.isa import Isa, best
from .matrix import LANES, WIDTHS


class KernelSet:
    """The kernels of one instruction set. `width` is how many tokens a panel of activations holds.

    on_compile(name), if given, is called before a kernel is compiled or read from the on-disk cache.
    """

    def __init__(self, isa: Isa | None = None, on_compile: Callable[[str], None] | None = None):
        self.isa = best() if isa is None else isa
        self.width, self.lanes = WIDTHS[self.isa], LANES[self.isa]
        self._on_compile = on_compile
        self._kernels: dict[tuple, object] = {}
        self._lock = threading.Lock()

    def get(self, make: Callable, *parameters: int):
        """The kernel make(isa, *parameters)."""
        key = make, parameters
        with self._lock:
            if key not in self._kernels:
                if self._on_compile is not None:
                    self._on_compile(make.__name__.removeprefix("make_"))
                self._kernels[key] = make(int(self.isa), *parameters)
            return self._kernels[key]
