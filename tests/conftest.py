"""Tests that need something of the system are collected where it is there; a line at the start says what is missing."""

from tests.io_shim import missing
from tests.memory_group import writable

_WITHOUT = {
    "engine/test_drive_faults.py": ("tests of failing drives", missing()),
    "engine/test_memory_pressure.py": ("tests under a memory limit", writable()),
}
collect_ignore = [name for name, (_, reason) in _WITHOUT.items() if reason]


def pytest_report_header() -> list[str]:
    return [f"not collected: {what}: {reason}" for what, reason in _WITHOUT.values() if reason]
