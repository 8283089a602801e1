"""How many threads pay: physical cores that this process may use.

In: affinity, core topology, control-group quota. Out: a number from 1 up.
"""

import math
import os
from pathlib import Path


def usable_cores(sys_cpu: Path = Path("/sys/devices/system/cpu"), cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Physical cores among the processors this process may run on, no more than its CPU quota. Two threads on one core gain nothing."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(sys_cpu, cpu) for cpu in allowed}
    quota = cpu_quota(cgroup, proc)
    return max(1, min(len(cores), math.floor(quota) if quota is not None else len(cores)))


def _core_of(sys_cpu: Path, cpu: int) -> str:
    """A name shared by the processors of one core; the processor itself where the system does not say."""
    try:
        return (sys_cpu / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float | None:
    """Processors that the control groups allow, the least over all ancestors; None without a limit."""
    limits = [limit for group in group_folders(cgroup, proc, "cpu") if (limit := _quota_of(group)) is not None]
    return min(limits, default=None)


def _quota_of(group: Path) -> float | None:
    if (text := read_text(group / "cpu.max")) is not None:  # version 2: "200000 100000" or "max 100000"
        quota, period = [*text.split(), "100000"][:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_v1, period_v1 = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
    if quota_v1 is None or period_v1 is None or int(quota_v1) <= 0:
        return None
    return int(quota_v1) / int(period_v1)


def group_folders(cgroup: Path, proc: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and its ancestors, version 2 and version 1, in those that exist.

    A container may see a path of the host in /proc/self/cgroup while only the root is mounted: missing folders are left out, the
    root stays.
    """
    folders: list[Path] = []
    for line in (read_text(proc / "self" / "cgroup") or "0::/").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroup / controller, cgroup / controllers]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            ancestors = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
            folders += [folder for folder in ancestors if folder.is_dir() and folder not in folders]
    return folders


def read_text(path: Path) -> str | None:
    """Contents of a small system file; None where it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
