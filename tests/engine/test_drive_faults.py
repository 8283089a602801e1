"""Programs over a drive that is slow, stumbles, fails, answers by halves or hangs: the same tokens, or one line that says what failed.

Collected where a C compiler and glibc are (tests/conftest.py).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from colibri_converter.convert import convert

from libcolibri.format import expert_offsets, read_manifest
from tests.io_shim import Drive

ROOT = Path(__file__).resolve().parents[2]
PROMPT, MAX_TOKENS = [(11 * i * i + 3 * i) % 300 for i in range(12)], 12
COMMAND = [sys.executable, "-c", "from colibri_cli.app import main; main()", "run", "-n", str(MAX_TOKENS), "--threads", "1", "--json"]
COMMAND += ["--no-usage-history"]  # what one program used is not to change what another reads
EXPERTS_PER_S = 150  # that the slow drive gives


class Program:
    """A program on a drive of its own, started when it is made."""

    def __init__(self, drive: Drive, command: list[str]):
        self.drive = drive
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=drive.environment, **pipes)

    def result(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, errors = self._process.communicate(timeout=120)
        return self._process.returncode, out, errors

    def facts(self) -> dict:
        """What a run that must succeed prints as JSON."""
        code, out, errors = self.result()
        assert code == 0, errors
        return json.loads(out)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """All programs of this file; they start together, because loading takes them longest."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    convert(ROOT / "tests" / "fixtures" / "tiny" / "qwen3_moe", folder, quant="q8_0", tokenizer=False)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    manifest, built = read_manifest(folder), Drive(tmp_path_factory.mktemp("drive"))

    def drive(files: str = "experts-", **faults: int) -> Drive:
        at = tmp_path_factory.mktemp("drive")
        os.link(built.library, at / built.library.name)
        made = Drive(at, files)
        made.set(**faults)
        return made

    def run(drive: Drive, *options: str) -> Program:
        prompt = " ".join(map(str, PROMPT))
        return Program(drive, [*COMMAND, "-m", str(folder), "-p", prompt, "--expert-cache", "3", *options])

    bad_spot = expert_offsets(folder, manifest, 2)
    session, mirror = drive(), ["--mirror", str(copy)]
    broken, hanging = {"eio_from": 0, "eio_to": 1 << 40}, {"hang_every": 1, "hang_ms": 90_000}
    return {
        "good": run(drive()),
        "slow": run(drive(bytes_per_s=EXPERTS_PER_S * manifest.experts[0].expert_bytes, eio_every=23)),
        "halves": run(drive(short=4096, hang_every=50, hang_ms=20), "--verify-experts"),
        "bad spot": run(drive("experts-00002", eio_from=bad_spot[0], eio_to=bad_spot[-1] + 1)),
        "tiny fails": run(drive("tiny/experts-", **broken), *mirror),
        "copy fails": run(drive("copy/experts-", **broken), *mirror),
        "tiny hangs": run(drive("tiny/experts-", **hanging), *mirror),
        "copy hangs": run(drive("copy/experts-", **hanging), *mirror),
        "mirror stumbles": run(drive("copy/experts-", eio_every=3, short=4096), *mirror),
        "both": run(drive("experts-00002", eio_from=bad_spot[0], eio_to=bad_spot[-1] + 1), *mirror),
        "session": Program(session, [sys.executable, "-c", SESSION_PROGRAM, str(folder), str(session.library.parent)]),
    }


@pytest.fixture(scope="module")
def expected(programs):
    """The program's answer on a good drive, seen through the shim."""
    facts = programs["good"].facts()
    assert set(programs["good"].drive.log) == {"."}
    return facts


def test_the_program_on_a_bad_drive(programs, expected):
    """Slow and stumbling, or by halves and hanging: the same tokens, later. Every failed read is read again."""
    slow, halves = programs["slow"], programs["halves"]
    results, misses = [slow.facts(), halves.facts()], expected["stats"]["expert_misses"]
    assert slow.drive.log.count("e") >= misses // 23 > 0 and set(halves.drive.log) == {"s", "h", "."}
    for result in results:
        assert result["token_ids"] == expected["token_ids"]
        assert result["stats"]["expert_misses"] > 0  # how many depends on what came first
    assert results[0]["stats"]["prefill_s"] + results[0]["stats"]["decode_s"] > 0.9 * misses / EXPERTS_PER_S


def test_the_program_on_a_drive_with_a_bad_spot(programs):
    """Exit code 1 and one line naming file, layer and expert."""
    code, out, errors = programs["bad spot"].result()
    assert code == 1 and out == ""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in errors
    pattern = r"error: .*experts-00002\.safetensors: layer 2 expert \d cannot be read \(.*Input/output error\), tried twice; check the dr"
    assert re.match(pattern, lines[0]), lines


@pytest.mark.parametrize("bad", ["tiny", "copy"])
def test_the_program_when_one_of_two_drives_fails(programs, expected, bad):
    """The same tokens, and one line that says which drive was given up."""
    code, out, errors = programs[f"{bad} fails"].result()
    assert code == 0 and json.loads(out)["token_ids"] == expected["token_ids"]
    (line,) = [line for line in errors.splitlines() if "reads in a row failed" in line]
    assert re.match(rf"\S*/{bad}: 3 reads in a row failed \(.*Input/output error\); what \S* has is read from there", line)


@pytest.mark.parametrize("bad", ["tiny", "copy"])
def test_the_program_when_one_of_two_drives_hangs(programs, expected, bad):
    """It ends long before the reads that hang do, with the same tokens and a line that names the drive."""
    code, out, errors = programs[f"{bad} hangs"].result()
    assert code == 0 and json.loads(out)["token_ids"] == expected["token_ids"]
    assert json.loads(out)["stats"]["prefill_s"] < 60 and "h" in programs[f"{bad} hangs"].drive.log
    (line,) = [line for line in errors.splitlines() if "does not answer" in line]
    assert re.match(rf"\S*/{bad}: does not answer; what \S* has is read from there alone since then", line)


def test_the_program_when_the_mirror_stumbles(programs, expected):
    stumbles = programs["mirror stumbles"]
    assert stumbles.facts()["token_ids"] == expected["token_ids"] and {"e", "s"} <= set(stumbles.drive.log)


def test_the_program_when_both_drives_have_the_bad_spot(programs):
    code, out, errors = programs["both"].result()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and out == ""
    assert re.match(r"error: \S*/tiny/experts-00002\S* layer 2 expert \d cannot be read .* and \S*/copy/experts-00002\S* cannot be", line)


SESSION_PROGRAM = """
import json, sys
from pathlib import Path
import libcolibri.engine
from libcolibri.engine import Engine
from libcolibri.errors import ExpertReadError
from tests.io_shim import Drive

drive, Store = Drive(Path(sys.argv[2])), libcolibri.engine.ExpertStore

def tokens(session, prompt):
    return [step.token_id for step in session.generate(prompt, max_tokens=MAX) if step.token_id is not None]

def attempt(session, prompt):
    try:
        return tokens(session, prompt)
    except ExpertReadError as error:
        return str(error)

def live_through(engine):
    session, got = engine.new_session(), []
    for step in session.generate(PROMPT, max_tokens=MAX):
        got += [] if step.token_id is None else [step.token_id]
        if len(got) == 4:
            break
    drive.set(eio_from=0, eio_to=1 << 40)
    errors = [attempt(session, prompt) for prompt in (PROMPT[::-1], PROMPT + got)]
    attempts = drive.log
    drive.set()
    facts = dict(errors=errors, attempts=attempts, again=got + tokens(session, PROMPT + got)[: MAX - 4])
    drive.set(eio_every=23)
    facts |= dict(stumbling=tokens(engine.new_session(), PROMPT), log=drive.log)
    drive.set(short=4096)
    facts |= dict(halves=tokens(engine.new_session(), PROMPT))
    facts["log"] += drive.log
    drive.set(short=1000)
    facts |= dict(crumbs=attempt(engine.new_session(), PROMPT))
    drive.set()
    return facts | dict(last=tokens(session, PROMPT))

for direct in (True, False):
    libcolibri.engine.ExpertStore = lambda *a, **k: Store(*a, **{**k, "drop_page_cache": direct})
    with Engine.open(sys.argv[1], threads=2, expert_cache=3) as engine:
        print(json.dumps(live_through(engine)))
""".replace("MAX", str(MAX_TOKENS)).replace("PROMPT", str(PROMPT))


def test_an_engine_outlives_its_drives_faults(programs, expected):
    """The session of a failed generation goes on where it was, with direct reads and with others."""
    code, out, errors = programs["session"].result()
    assert code == 0, errors
    direct, plain = map(json.loads, out.splitlines())
    for facts in (direct, plain):
        for name in ("again", "stumbling", "halves", "last"):
            assert facts[name] == expected["token_ids"], name
        assert all(re.search(r"layer \d expert \d cannot be read .*Input/output error", text) for text in facts["errors"])
        assert set(facts["attempts"]) == {"e"} and len(facts["attempts"]) >= 2 * len(facts["errors"])  # each is tried twice
        assert {"e", "s"} <= set(facts["log"])
    assert plain["crumbs"] == expected["token_ids"]
    # Direct reads go on at multiples of 4096 bytes only. A file system without them (direct is then plain) reads crumbs as well.
    too_early = r"layer 0 expert \d cannot be read \(ends at byte \d+, \d+ bytes too early\)"
    assert direct["crumbs"] == expected["token_ids"] or re.search(too_early, direct["crumbs"])
