"""How a drive is read: another setting only where it is clearly faster, tested once, remembered in a file that is never trusted."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.drive_probe import DEFAULT_SETTINGS, DriveProbe, DriveSettings, find_settings, probe_drive
from libcolibri.drive_settings import KnownDrives
from libcolibri.file_reader import FileReader
from libcolibri.format import read_manifest
from tests.tiny_model import make_model

FAST = DriveProbe(DriveSettings(False, 8, 1 << 20), 3e9, 2e9)


class FakeDrive:
    """Speeds by setting, and a clock that goes on by `slice_s` with every measurement."""

    def __init__(self, speed, slice_s: float = 0.02):
        self.speed, self.slice_s, self.now, self.asked = speed, slice_s, 100.0, []

    def __call__(self, settings: DriveSettings) -> float:
        self.asked.append(settings)
        self.now += self.slice_s
        return self.speed(settings)

    def find(self, direct_works: bool = True) -> DriveProbe:
        return find_settings(self, direct_works, lambda: self.now)


@pytest.mark.parametrize("best", [DriveSettings(False), DriveSettings(True, 8), DriveSettings(False, 16, 4 << 20), DriveSettings(True, 2)])
def test_what_is_clearly_faster_is_found(best):
    def speed(one: DriveSettings) -> float:
        names = ("direct", "threads", "piece_bytes")
        return 1e9 + sum(2e8 for name in names if getattr(one, name) == getattr(best, name) != getattr(DEFAULT_SETTINGS, name))

    found = FakeDrive(speed).find()
    assert found.settings == best and found.bytes_s > 1.1 * found.default_bytes_s == 1.1e9


def test_what_is_hardly_faster_is_not_used():
    found = FakeDrive(lambda one: 1e9 if one == DEFAULT_SETTINGS else 1.09e9).find()
    assert found == DriveProbe(DEFAULT_SETTINGS, 1e9, 1e9)


@pytest.mark.parametrize("lucky_turns", [1, 2])
def test_what_was_lucky_once_or_twice_is_not_used(lucky_turns):
    turns = [0]

    def speed(one: DriveSettings) -> float:
        if one.threads != 8 or one.piece_bytes != DEFAULT_SETTINGS.piece_bytes:
            return 1e9
        turns[0] += 1
        return 2e9 if turns[0] <= lucky_turns else 1e9

    assert FakeDrive(speed).find().settings == DEFAULT_SETTINGS and turns[0] == 3


@pytest.mark.parametrize("slice_s", [0.001, 0.02, 0.05, 0.2, 3.0])
def test_it_ends_in_time(slice_s):
    """A slow drive takes as long as its first two measurements; what is left decides how many others there are."""
    drive = FakeDrive(lambda one: 1e9 + one.threads, slice_s)
    drive.find()
    assert drive.now - 100.0 <= max(0.451, 2 * slice_s + 1e-9) and set(drive.asked[:2]) == {DEFAULT_SETTINGS}


def test_without_direct_reads():
    drive = FakeDrive(lambda one: 1e9 * one.threads)
    assert drive.find(direct_works=False).settings == DriveSettings(False, 16) and not any(one.direct for one in drive.asked)
    assert FakeDrive(lambda one: 1e9).find(direct_works=False).settings == DEFAULT_SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_real_drive(folder, monkeypatch):
    """The reads are real ones, inside the files, and everything that was opened is closed."""
    n_open, manifest, reads = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, read_manifest(folder), []
    original = FileReader.read_into
    monkeypatch.setattr(FileReader, "read_into", lambda self, target, offset: reads.append(self.direct) or original(self, target, offset))
    paths, size = [folder / entry.file for entry in manifest.experts.values()], manifest.experts[0].expert_bytes
    found = probe_drive(paths, size)
    assert found.bytes_s > 0 and found.default_bytes_s > 0 and {False} <= set(reads)
    assert not n_open or len(os.listdir("/proc/self/fd")) == n_open


class Probe:
    """Counts, and answers as told."""

    def __init__(self, found: DriveProbe = FAST, error: OSError | None = None):
        self.found, self.error, self.count = found, error, 0

    def __call__(self, paths, read_bytes):
        assert all(path.stat().st_size >= read_bytes for path in paths)
        self.count += 1
        if self.error is not None:
            raise self.error
        return self.found


def ask(path, folder, probe) -> tuple[DriveSettings, list[str]]:
    known = KnownDrives(path, probe)
    return known.settings_for(folder, read_manifest(folder)), known.remarks


def test_a_drive_is_tested_once(folder, tmp_path):
    path, probe = tmp_path / "new" / "drives.json", Probe()
    for _ in range(3):
        assert ask(path, folder, probe) == (FAST.settings, [])
    assert probe.count == 1
    entry = {"total_bytes": shutil.disk_usage(folder).total, "direct": False, "threads": 8, "piece_bytes": 1 << 20}
    device = os.stat(folder).st_dev
    drives = {f"{os.major(device)}:{os.minor(device)}": entry | {"bytes_s": 3000000000, "default_bytes_s": 2000000000}}
    assert json.loads(path.read_bytes()) == {"format": "colibri-drives-1", "drives": drives}


def test_another_drive_with_the_same_number_is_tested(folder, tmp_path):
    path, probe = tmp_path / "drives.json", Probe()
    ask(path, folder, probe)
    facts = json.loads(path.read_bytes())
    facts["drives"] = {"9:9": 5} | {key: entry | {"total_bytes": 1} for key, entry in facts["drives"].items()}
    path.write_text(json.dumps(facts, separators=(",", ":")))
    assert ask(path, folder, probe) == (FAST.settings, []) and probe.count == 2
    assert json.loads(path.read_bytes())["drives"]["9:9"] == 5  # not ours to judge
    ask(path, folder, probe)
    assert probe.count == 2


WRONG = [True, 0, -1, 1.5, "8", None, [], 10**30, float("nan")]


@pytest.mark.parametrize("name", ["direct", "threads", "piece_bytes", "total_bytes"])
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_nonsense_is_tested_anew(folder, tmp_path, name, value):
    path, probe = tmp_path / "drives.json", Probe()
    ask(path, folder, probe)
    facts = json.loads(path.read_bytes())
    facts["drives"] = {key: entry | {name: value} for key, entry in facts["drives"].items()}
    path.write_text(json.dumps(facts, separators=(",", ":")))
    known = name == "direct" and value is True
    assert ask(path, folder, probe) == (replace(FAST.settings, direct=known), []) and probe.count == (1 if known else 2)


REMAINS = [b"", b"\0" * 40, b'{"form', b'{"format":"colibri-drives-1","drives":[', b'{"format":"colibri-drives-2","drives":{}}']


@pytest.mark.parametrize("data", REMAINS)
def test_what_a_power_failure_left_is_replaced(folder, tmp_path, data):
    path, probe = tmp_path / "drives.json", Probe()
    path.write_bytes(data)
    assert ask(path, folder, probe) == (FAST.settings, []) == ask(path, folder, probe) and probe.count == 1


def test_a_file_of_another_kind_is_left_alone(folder, tmp_path):
    path, probe = tmp_path / "notes.txt", Probe()
    path.write_text("my notes")
    what = f"drive settings {path}: is no file of tested drives and is left alone; the drive is tested again at the next start"
    assert ask(path, folder, probe) == (FAST.settings, [what]) and path.read_text() == "my notes"


def test_a_place_that_cannot_be_written_to(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "drives.json", tmp_path):
        found, (remark,) = ask(path, folder, Probe())
        assert found == FAST.settings and remark.startswith(f"drive settings {path}: cannot be written (")


def test_a_drive_that_cannot_be_tested(folder, tmp_path):
    path = tmp_path / "drives.json"
    assert ask(path, folder, Probe(error=OSError(errno.EIO, "Input/output error"))) == (DEFAULT_SETTINGS, [])
    assert ask(path, folder, Probe(DriveProbe())) == (DEFAULT_SETTINGS, []) and not path.exists()
    assert KnownDrives(path, Probe()).settings_for(tmp_path / "nowhere", read_manifest(folder)) == DEFAULT_SETTINGS


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
json_values = st.recursive(scalars, lambda values: st.lists(values) | st.dictionaries(st.text(), values))


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.binary(), json_values.map(lambda v: json.dumps({"format": "colibri-drives-1", "drives": v}).encode())))
def test_no_file_ever_fails(folder, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("drives") / "drives.json"
    path.write_bytes(data)
    assert ask(path, folder, Probe())[0] == FAST.settings
