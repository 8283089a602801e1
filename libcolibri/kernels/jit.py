"""How kernels are compiled: one signature, and one cache directory per state of the sources.

numba's on-disk cache notices an edit only in a function's own file, so the cache lives in a directory named by a hash over
every source file of `kernels/`, `simd/` and `quant/`, the numba version and the processor. numba reads the directory's name while it
decorates; it is set for that moment only, because the host program may have a setting of its own.
"""

import functools
import hashlib
import os
import pathlib
import sys
import threading

import llvmlite.binding as llvm
import numba as nb

SIGNATURE = "int64(int64, int64, int64)"
_decorating = threading.RLock()


def _user_cache() -> pathlib.Path:
    home = pathlib.Path.home()
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "colibri" / "kernels"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "colibri" / "kernels"
    return home / ".cache" / "colibri" / "kernels"


@functools.cache
def cache_directory() -> pathlib.Path | None:
    """Where compiled kernels are kept, or None where nothing can be written (they are then compiled in every process)."""
    stamp = hashlib.sha256(f"{nb.__version__} {llvm.get_host_cpu_name()}".encode())
    package = pathlib.Path(__file__).parent.parent
    for source in sorted([path for folder in ("kernels", "simd", "quant") for path in package.glob(f"{folder}/*.py")]):
        stamp.update(source.read_bytes())
    directory = _user_cache() / stamp.hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def _decorate(decorator, function):
    directory = cache_directory()
    if directory is None:
        return decorator(cache=False)(function)
    with _decorating:
        previous, nb.config.CACHE_DIR = nb.config.CACHE_DIR, str(directory)
        try:
            return decorator(cache=True)(function)
        finally:
            nb.config.CACHE_DIR = previous


def kernel(function):
    """kernel(operands, rank, threads) -> status, callable by address from the replay loop.

    `operands` is the address of int64 slots: addresses of arrays, sizes, strides in bytes. float32 values go by address.
    """
    return _decorate(functools.partial(nb.cfunc, SIGNATURE, nopython=True, error_model="numpy"), function)


def native(signature):
    """A compiled function without the GIL, called from Python; compiled (or read from the cache) at once."""
    return lambda function: _decorate(functools.partial(nb.njit, signature, nogil=True, error_model="numpy"), function)


def on_call(function):
    """A compiled function without the GIL on numpy arrays, specialised (or read from the cache) when it is first called."""
    return _decorate(functools.partial(nb.njit, nogil=True), function)


def inline(function):
    """A helper that always melts into its kernel."""
    return nb.njit(forceinline=True, error_model="numpy")(function)
