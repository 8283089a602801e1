"""A process in a memory control group whose room becomes smaller while it generates: it gives experts back and answers the same.

Collected where such a group can be made (tests/conftest.py); tests/experts/test_memory_watch.py has pretended systems.
"""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from libcolibri.engine import Engine
from tests.memory_group import MemoryGroup
from tests.tiny_model import make_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT, MAX_TOKENS = [(11 * i * i + 3 * i) % 47 for i in range(16)], 32
# 192 experts of 0.8 MB, so that what a watch gives back is a part of them.
SHAPE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 96, "num_hidden_layers": 2, "mlp_only_layers": []}
PROGRAM = """
import json, sys, time
from pathlib import Path
from libcolibri.engine import Engine
import libcolibri.engine

model, group, limit_name, usage_name, mode = sys.argv[1:]
MIB, group = 1 << 20, Path(group)
usage = lambda: int((group / usage_name).read_text())
set_limit = lambda limit: (group / limit_name).write_text(str(limit))
if mode == "unwatched":
    libcolibri.engine.MemoryWatch = lambda: None
ballast = []
with Engine.open(model, threads=1, preload=True) as engine:
    full, first = engine.experts.capacity_bytes, usage()
    goal = first - 30 * MIB
    if mode != "lowered":
        set_limit(first + 70 * MIB)
    tokens = []
    for step in engine.new_session().generate({prompt}, max_tokens={max_tokens}):
        if step.token_id is not None:
            tokens.append(step.token_id)
        time.sleep(0.04)
        if mode == "lowered":
            set_limit(max(goal, usage() + 8 * MIB))
        elif len(ballast) < 26:
            ballast.append(bytearray(b"x" * (4 * MIB)))
    print(json.dumps(dict(tokens=tokens, full=full, now=engine.experts.capacity_bytes, shrinks=step.stats.expert_shrinks,
        first=first, limit=int((group / limit_name).read_text()), notices=engine.notices, usage=usage())))
""".replace("{prompt}", str(PROMPT)).replace("{max_tokens}", str(MAX_TOKENS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "wide", eos_token_id=None, **SHAPE)


@pytest.fixture(scope="module")
def expected(folder):
    with Engine.open(folder, threads=1, expert_cache=2) as engine:
        return [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=MAX_TOKENS) if s.token_id is not None]


@pytest.fixture(scope="module")
def runs(folder):
    """mode -> (exit code, standard output, standard error). They run at the same time: loading takes them longest."""
    with ExitStack() as groups:
        started = {}
        for mode in ("lowered", "watched", "unwatched"):
            group = groups.enter_context(MemoryGroup(mode))
            command = [sys.executable, "-c", PROGRAM, str(folder), str(group.path), group.limit_name, group.usage_name, mode]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started[mode] = subprocess.Popen(command, preexec_fn=group.join, cwd=ROOT, **pipes)
        ended = {mode: process.communicate(timeout=120) for mode, process in started.items()}
        yield {mode: (started[mode].returncode, *ended[mode]) for mode in started}


def facts_of(run: tuple[int, str, str]) -> dict:
    code, out, errors = run
    assert code == 0, errors
    return json.loads(out)


def test_a_limit_is_lowered_while_generating(runs, expected):
    """In steps, as a version 1 group refuses a limit below what is in use: the process makes the room for the next."""
    facts = facts_of(runs["lowered"])
    assert facts["tokens"] == expected and facts["shrinks"] > 0
    assert facts["limit"] <= facts["first"] - (29 << 20) and facts["usage"] <= facts["limit"] and facts["now"] < facts["full"]
    assert facts["notices"][0].startswith("memory ran short: the expert cache gave some back")


def test_another_program_takes_the_memory(runs, expected):
    """104 MB are taken where 70 are left."""
    facts = facts_of(runs["watched"])
    assert facts["tokens"] == expected and facts["shrinks"] > 0 and facts["now"] < facts["full"]


def test_the_system_would_kill_it(runs):
    """The same without the watch, so that the pressure is known to be real."""
    assert runs["unwatched"][0] == -signal.SIGKILL
