"""Large aligned blocks of anonymous memory, for weights and expert slots.

In: a size. Out: a uint8 array whose address is a multiple of 4096, zero until written, returned to the system when the last view dies.
"""

import mmap

import numpy as np

from .errors import MemoryBudgetError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


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
