"""What goes where in memory, decided before anything large is allocated.

In:  sizes from the manifest and config, the memory this process may use, the user's wish for the expert cache
Out: `MemoryPlan`, or MemoryBudgetError saying what would fit
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cpus import group_folders, read_text
from .errors import ConfigError, MemoryBudgetError

MIB = 1 << 20
DEFAULT_CONTEXT = 4096
LEAST_CONTEXT = 512
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


# --- the user's wish


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """--expert-cache: everything that is left ("auto"), `amount` experts per layer ("count"), or `amount` bytes ("bytes")."""

    kind: Literal["auto", "count", "bytes"]
    amount: int = 0

    def in_bytes(self, expert_bytes: dict[int, int], num_experts: dict[int, int]) -> int:
        """Bytes wished for, no more than all experts have. For "count" the exact size of that many experts of each layer."""
        total = sum(expert_bytes[layer] * num_experts[layer] for layer in expert_bytes)
        if self.kind == "auto":
            return total
        if self.kind == "count":
            return sum(size * min(self.amount, num_experts[layer]) for layer, size in expert_bytes.items())
        return min(self.amount, total)


def parse_budget(value: str | int) -> CacheBudget:
    """The wish behind "auto", a number of experts per layer (12 or "12"), or a size: "6GB" is 6 * 10**9 bytes, "512MiB" 512 * 2**20.

    Raises ConfigError for anything else.
    """
    text = str(value).strip().lower()
    if text == "auto":
        return CacheBudget("auto")
    number = None if isinstance(value, bool) else re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b)?", text)
    if number is None:
        raise ConfigError(
            f"expert cache {value!r}: expected 'auto', a number of experts per layer such as 12, or a size such as 6GB or 512MiB"
        )
    digits, unit, byte = number.groups()
    if unit is None and byte is None:
        if "." in digits or int(digits) < 1:
            raise ConfigError(
                f"expert cache {value!r}: a number of experts per layer is a whole number from 1 up; a size needs a unit, as in 6GB"
            )
        return CacheBudget("count", int(digits))
    amount = int(float(digits) * _UNITS[unit or ""])
    if amount < 1:
        raise ConfigError(f"expert cache {value!r} is no memory at all; expected a size such as 6GB or 512MiB")
    return CacheBudget("bytes", amount)


# --- what there is


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: what the system has free, its control groups leave, and its address-space limit allows.

    Page cache counts as free, because the system gives it up on demand.
    """
    limits = [memory_left(proc, cgroup), *_process_limits_left(proc)]
    return max(0, min(limits))


def memory_left(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Like `available_memory` without the limits on address space, which giving memory back does not widen. May be below 0."""
    group = _group_available(cgroup, proc)
    system = _system_available(proc)
    return system if group is None else min(system, group)


def _system_available(proc: Path) -> int:
    text = read_text(proc / "meminfo")
    if text is not None and (found := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)):
        return int(found[1]) * 1024
    if sys.platform == "win32":
        return _windows_available()
    # macOS tells the installed memory only, without more than the standard library: count on 60 % of it.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 6 // 10


def _windows_available() -> int:
    class MemoryStatus(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *(
                (name, ctypes.c_ulonglong)
                for name in ("total", "available", "page_total", "page_left", "virtual", "virtual_left", "extended")
            ),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        raise MemoryBudgetError("Windows did not say how much memory is free; give --expert-cache a size such as 2GB")
    return int(status.available)


def _group_available(cgroup: Path, proc: Path) -> int | None:
    """The least of (limit - usage + reclaimable page cache) over the process's control groups; None without a limit."""
    left = [free for group in group_folders(cgroup, proc, "memory") if (free := _left_in(group)) is not None]
    return min(left, default=None)


def _left_in(group: Path) -> int | None:
    """Bytes that a group's own limits leave; swap is not counted, neither as room nor as use."""
    usage = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
    if usage is None:
        return None
    stat = dict(line.split() for line in (read_text(group / "memory.stat") or "").splitlines())
    # Above memory.high a process is not killed but slowed down until it hardly moves. hierarchical_memory_limit knows of groups further
    # up that a container does not see.
    texts = [read_text(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    texts.append(stat.get("hierarchical_memory_limit"))
    limits = [int(text) for text in texts if text is not None and text != "max"]
    limit = min((limit for limit in limits if limit < 1 << 60), default=None)  # version 1 writes "no limit" as about 2**63
    return None if limit is None else limit - int(usage) + _page_cache(stat)


def _page_cache(stat: dict[str, str]) -> int:
    """File pages on the reclaim lists; shared memory is not among them. Version 1 has group totals beside the group's own."""
    prefix = "total_" if "total_inactive_file" in stat else ""
    return int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))


def _process_limits_left(proc: Path) -> list[int]:
    """What the limits on the process's address space and private memory (`ulimit -v`, `ulimit -d`) leave."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return []
    left, status = [], read_text(proc / "self" / "status") or ""
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
            left.append(limit - (int(found[1]) * 1024 if found else 0))
    return left


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", read_text(proc / "self" / "status") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# --- the plan


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes for each use, out of `available` bytes. `experts` is the expert cache, `experts_total` what all routed experts would take.

    runtime   what the process has at the time of planning (Python, its libraries, a host program), kernels and vocabulary
    """

    available: int
    dense: int
    kv: int
    activations: int
    experts: int
    experts_total: int
    context_length: int
    runtime: int = 0

    @property
    def total(self) -> int:
        """What the process will have at most, while it has one session."""
        return self.runtime + self.dense + self.kv + self.activations + self.experts

    @property
    def free(self) -> int:
        """What is left for the system, its page cache and the host program."""
        return self.available - self.total

    @property
    def streams_experts(self) -> bool:
        """Whether some experts stay on the drive."""
        return self.experts < self.experts_total

    def line(self) -> str:
        """The plan in one line."""
        tokens = "1 token" if self.context_length == 1 else f"{self.context_length} tokens"
        parts = [f"runtime {size_text(self.runtime)}", f"dense {size_text(self.dense)}", f"KV {size_text(self.kv)} ({tokens})"]
        parts.append(f"activations {size_text(self.activations)}")
        if self.experts_total:
            share = f"of {size_text(self.experts_total)}, {100 * self.experts // self.experts_total} %" if self.streams_experts else "all"
            parts.append(f"experts {size_text(self.experts)} ({share})")
        return f"memory: {', '.join(parts)}, free {size_text(self.free)} of {size_text(self.available)}"


@dataclass(frozen=True, slots=True)
class Needs:
    """Sizes that a plan is made from. `floor` is the least expert cache, `runtime` that of MemoryPlan."""

    dense: int
    expert_bytes: dict[int, int]
    num_experts: dict[int, int]
    floor: int
    runtime: int = 0

    @property
    def experts_total(self) -> int:
        return sum(size * self.num_experts[layer] for layer, size in self.expert_bytes.items())


def reserve_bytes(available: int) -> int:
    """What "auto" leaves alone: a tenth, within 128 MiB and 1 GiB. A bigger cache that makes the system swap is a slower one."""
    return min(max(available // 10, 128 * MIB), 1024 * MIB)


def choose_context(wished: int | None, longest: int, bytes_of: Callable[[int], int], needs: Needs, available: int) -> int:
    """The context length: as wished, or min(longest, 4096), halved down to 512 while memory is short.

    bytes_of   context length -> bytes of a session's state and of the activations

    Raises ConfigError for a wish beyond what the model's positions allow.
    """
    if wished is not None:
        if not 1 <= wished <= longest:
            raise ConfigError(f"context length {wished}: this model's positions allow 1 to {longest}")
        return wished
    length = min(longest, DEFAULT_CONTEXT)
    spare = available - needs.runtime - needs.dense - needs.floor
    while length // 2 >= LEAST_CONTEXT and bytes_of(length) > spare:
        length //= 2
    return length


def plan_memory(needs: Needs, budget: CacheBudget, kv: int, activations: int, context_length: int, available: int) -> MemoryPlan:
    """Divide `available` bytes. "auto" gives the experts what is left above a reserve, never less than the floor.

    Raises MemoryBudgetError when even the floor does not fit, or a wished size exceeds what is left, naming both.
    """
    fixed = needs.runtime + needs.dense + kv + activations
    left = available - fixed
    floor = min(needs.floor, needs.experts_total)
    if left < floor:
        experts_part = f", experts at least {size_text(floor)}" if floor else ""
        raise MemoryBudgetError(
            f"the model needs {size_text(fixed + floor)} (runtime {size_text(needs.runtime)}, dense {size_text(needs.dense)}, "
            f"KV {size_text(kv)} for {context_length} tokens{experts_part}), {size_text(available)} are available: "
            "use a shorter context, a smaller quantisation, or close other programs"
        )
    experts = budget.in_bytes(needs.expert_bytes, needs.num_experts)
    if budget.kind == "auto":
        experts = min(experts, max(floor, left - reserve_bytes(available)))
    elif experts > left:
        raise MemoryBudgetError(
            f"an expert cache of {size_text(experts)} does not fit beside {size_text(fixed)} for the rest in {size_text(available)}: "
            f"give at most {left // 10**6}MB, or 'auto'"
        )
    return MemoryPlan(available, needs.dense, kv, activations, experts, needs.experts_total, context_length, needs.runtime)


def size_text(n_bytes: int) -> str:
    """A size as people write it, in decimal units."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n_bytes) >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes} bytes"
