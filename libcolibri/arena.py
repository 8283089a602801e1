"""Large aligned blocks of anonymous memory, for weights and expert slots.

In: a size. Out: a uint8 array whose address is a multiple of 4096, zero until written, returned to the system when the last view dies,
or part by part with `give_back`.
"""

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable

import numpy as np

from .errors import MemoryBudgetError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_MADV_COLD = 20  # Linux; Python has no name for it


def align_up(size: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `size`."""
    return -(-size // alignment) * alignment


def allocate(n_bytes: int, what: str) -> np.ndarray:
    """A zeroed uint8 array (n_bytes,), starting at a huge-page boundary when it is that large, and advised to use huge pages.

    The memory is private to the process and is taken from the system only as it is written. `what` names it in the error.
    """
    large = n_bytes >= HUGE_PAGE_BYTES
    try:
        block = _map(n_bytes + HUGE_PAGE_BYTES if large else max(n_bytes, 1))
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryBudgetError(f"{what}: the system refused {n_bytes:,} bytes of memory; close other programs or ask for less") from error
    if large and hasattr(block, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise_huge_pages(block)
    whole = np.frombuffer(block, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES if large else 0
    return whole[start : start + n_bytes]


def _map(n_bytes: int) -> mmap.mmap:
    # Python maps anonymous memory as shared by default, which cannot have huge pages and survives into forked children.
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, n_bytes)


def _advise_huge_pages(block: mmap.mmap) -> None:
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # EINVAL: a kernel built without huge pages. They are an optimisation only, so their absence is no fault.
        if error.errno != 22:
            raise


def can_give_back() -> bool:
    """Whether `give_back` returns memory at once: on Linux. Elsewhere a system may take its time, or has no such call."""
    return sys.platform == "linux"


def give_back(part: np.ndarray) -> None:
    """Return the pages that lie within a contiguous part of an allocated block to the system; it stays mapped and reads as zeros.

    Only where `can_give_back`. Writing to it takes memory again; addresses stay valid throughout.
    """
    page = mmap.PAGESIZE
    start = align_up(part.ctypes.data, page)
    n_bytes = (part.ctypes.data + part.nbytes) // page * page - start
    if n_bytes <= 0:
        return
    # A huge page that is emptied in part stays whole, and charged to the process's control group, until the system is short of memory.
    # Calling the part cold splits it first. Systems before Linux 5.4 do not know the word.
    if _madvise()(start, n_bytes, _MADV_COLD) != 0 and ctypes.get_errno() != errno.EINVAL:
        raise _refusal()
    if _madvise()(start, n_bytes, mmap.MADV_DONTNEED) != 0:
        raise _refusal()


def _refusal() -> OSError:
    return OSError(ctypes.get_errno(), f"the system does not take memory back ({os.strerror(ctypes.get_errno())})")


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
