"""Each command: what it prints where, its exit codes, its --help."""

import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_fakes import INTERRUPT, FakeEngine, FakeKnowledgeBase, FakeServices, Thought, fake_hit, make_home
from click.testing import CliRunner, Result
from colibri_cli.app import COMMANDS, main
from colibri_cli.commands import chat, ingest
from colibri_cli.errors import FAILED, INTERRUPTED, NOT_IN_DOCUMENTS, SKIPPED, USAGE, reports_errors, user_message
from colibri_cli.repl.state import ReplState

from libcolibri.cache_simulator import OPTIMUM
from libcolibri.errors import ConfigError, FormatError
from libcolibri.eviction import POLICIES
from libcolibri.expert_trace import TraceWriter


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path)


def invoke(command: Any, arguments: Sequence[str], fakes: FakeServices, home: Path, stdin: str | None = None, **replaced: Any) -> Result:
    result = CliRunner().invoke(command, [*arguments], obj=fakes.services(home, **replaced), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# --- colibri run


def run(home: Path, engine: FakeEngine, *arguments: str, stdin: str | None = None, **replaced: Any) -> Result:
    return invoke(main, ["run", "-m", "a-chat-model", *arguments], FakeServices(engine), home, stdin, **replaced)


def test_run_prints_the_text_alone_on_standard_output(home: Path) -> None:
    engine = FakeEngine(["Hel", "lo"])
    result = run(home, engine, "-p", "Hi", "--system", "Be short")
    assert result.stdout == "Hello\n" and result.exit_code == 0
    assert result.stderr.splitlines() == [
        "plan: 1.0 GB dense, 2.0 GB experts",
        "3 tokens at 4.0/s, first after 5.50 s (10 prompt tokens, 4 reused), expert hit rate 75 %, 8.0 GB read",
    ]
    assert engine.prompts == [[{"role": "system", "content": "Be short"}, {"role": "user", "content": "Hi"}]]
    assert engine.closed


def test_run_reads_the_prompt_from_a_pipe(home: Path) -> None:
    for arguments in ([], ["-p", "-"]):
        engine = FakeEngine("x")
        run(home, engine, "--raw", *arguments, stdin="Once upon\n")
        assert engine.prompts == ["Once upon\n"]


def test_run_passes_every_option_on(home: Path) -> None:
    engine = FakeEngine("x")
    fakes = FakeServices(engine)
    words = "run -m a-chat-model -p Hi --threads 2 --ctx 512 --prefetch off --preload --temp 0.5 --top-k 7 --top-p 0.9 --min-p 0.1"
    words += " --mirror /other/drive --verify-experts --repeat-penalty 1.1 --seed 3 -n 9 --stop END --stop STOP --expert-cache"
    for given, expected in (("6GB", "6GB"), ("12", 12), ("auto", "auto"), ("512MiB", "512MiB"), ("1.5g", "1.5g")):
        engine.replies.append("x")
        invoke(main, [*words.split(), given], fakes, home)
        options = {"threads": 2, "context_length": 512, "expert_cache": expected, "preload": True, "prefetch": "off"}
        options |= {"mirror": Path("/other/drive"), "verify_experts": True, "usage_history": home / "usage"}
        options |= {"drive_settings": home / "drives.json"}
        assert fakes.opened[-1] == (home / "models" / "a-chat-model", options)
    sampling, max_tokens, stop = engine.samplings[0]
    assert vars(sampling) == {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
    assert (max_tokens, stop) == (9, ("END", "STOP"))


def test_usage_is_remembered_unless_declined(home: Path) -> None:
    fakes = FakeServices(FakeEngine("x", "y"))
    for extra, folder in ([], home / "usage"), (["--no-usage-history"], None):
        invoke(main, ["run", "-m", "a-chat-model", "-p", "Hi", *extra], fakes, home)
        assert fakes.opened[-1][1].get("usage_history") == folder
    assert (home / "usage").is_dir()


def test_drives_are_tested_unless_declined(home: Path) -> None:
    fakes = FakeServices(FakeEngine("x", "y"))
    for extra, path in ([], home / "drives.json"), (["--no-drive-test"], None):
        invoke(main, ["run", "-m", "a-chat-model", "-p", "Hi", *extra], fakes, home)
        assert fakes.opened[-1][1].get("drive_settings") == path


def test_a_folder_that_cannot_be_made_is_no_error(home: Path) -> None:
    (home / "usage").write_text("in the way")
    assert run(home, FakeEngine("x"), "-p", "Hi").exit_code == 0


def test_experts_are_pinned(home: Path) -> None:
    fakes = FakeServices(FakeEngine("x"))
    invoke(main, ["run", "-m", "a-chat-model", "-p", "Hi", "--pin", "3:17, 3:20-22", "--pin", "0:1"], fakes, home)
    assert fakes.opened[-1][1]["pin"] == [(3, 17), (3, 20), (3, 21), (3, 22), (0, 1)]


def test_pins_are_for_the_model_that_was_named(home: Path) -> None:
    fakes = FakeServices(FakeEngine())
    state = ReplState(fakes.services(home), engine_options={"pin": [(0, 1)], "mirror": home / "copy", "preload": True})
    for path in (home / "a", home / "b", home / "a"):
        state.open_model(path)
    assert ["pin" in options for _, options in fakes.opened] == [True, False, False] and fakes.opened[1][1]["preload"]
    assert ["mirror" in options for _, options in fakes.opened] == [True, False, False]


def test_run_records_a_trace_and_trace_replays_it(home: Path, tmp_path: Path) -> None:
    fakes = FakeServices(FakeEngine("x"))
    invoke(main, ["run", "-m", "a-chat-model", "-p", "Hi", "--trace", "t", "--expert-policy", "lru"], fakes, home)
    assert fakes.opened[-1][1] | {"trace": Path("t"), "expert_policy": "lru"} == fakes.opened[-1][1]
    path = tmp_path / "t"
    with TraceWriter(path, {0: 4096}, {0: 20}) as writer:
        for n in range(30):
            writer.add(1, [np.array([n % 3, 3 + n % 5])])
    result = invoke(main, ["trace", str(path)], fakes, home)
    lines = result.stdout.splitlines()
    assert lines[0] == "30 passes, 1 layers, 81.9 kB of experts" and lines[1].split()[-5:] == [*POLICIES, OPTIMUM]
    assert lines[-1].split() == ["73.7", "kB", "(90%)", *["86.7%"] * 5]  # 8 experts of 60 uses are read once
    facts = json.loads(invoke(main, ["trace", str(path), "--warm-up", "15", "--json"], fakes, home).stdout)
    assert facts["passes"] == 30 and facts["runs"][-1]["policy"] == OPTIMUM and facts["runs"][-1]["misses"] == 0
    refused = invoke(main, ["trace", str(tmp_path / "none")], fakes, home)
    assert refused.exit_code == FAILED and "cannot be read" in refused.stderr


def test_run_gives_one_json_object(home: Path) -> None:
    result = run(home, FakeEngine(["a\x1b", "\x9bb"]), "-p", "Hi", "--json")
    assert "\x9b" not in result.stdout
    facts = json.loads(result.stdout)
    assert facts["text"] == "a\x1b\x9bb" and facts["token_ids"] == [100, 101] and facts["finish_reason"] == "stop"
    assert facts["stats"]["decode_tok_s"] == 4.0 and facts["stats"]["expert_hit_rate"] == 0.75
    prompt, answer = facts["stats"]["prefill"], facts["stats"]["decode"]
    assert prompt["experts"]["layers"][1] == {"layer": 2, "hits": 2, "misses": 2, "hit_rate": 0.5}
    assert prompt["roofline"] | {"bound": "drive", "needed_s": 3.5, "share": 0.7} == prompt["roofline"]
    assert answer["roofline"] | {"bound": "memory", "needed_s": 0.4, "share": 0.8} == answer["roofline"]


def test_run_with_stats_prints_prompt_and_answer_apart(home: Path) -> None:
    lines = run(home, FakeEngine("x"), "-p", "Hi", "--stats").stderr.splitlines()
    assert lines[-9:] == [
        "prompt      6 tokens read in 5.00 s, 1.2 tokens/s; 4 more were known from before",
        "  experts   3 of 8 were in memory, hit rate 38 %; worst layer 0 with 25 %, best layer 2 with 50 %",
        "  drive     8.0 GB read at 2.0 GB/s, 1.3 GB a token; 3.00 s spent waiting, 60 % of the time",
        "  ahead     4 experts read before a layer asked, 75 % of them needed; 1.0 GB for nothing",
        "  possible  70 % reached: reading 7.0 GB at 2.0 GB/s, the drive's best, takes 3.50 s",
        "answer      3 tokens, the first after 5.50 s, the other 2 in 0.50 s, 4.0 tokens/s",
        "  experts   15 of 16 were in memory, hit rate 94 %; worst layer 2 with 88 %, best layer 0 with 100 %",
        "  drive     1.0 MB read, 500.0 kB a token; 0.00 s spent waiting, 0 % of the time",
        "  possible  80 % reached: going through 4.0 GB at 10.0 GB/s, memory's best, takes 0.40 s",
    ]


def test_run_without_a_tokenizer_takes_and_gives_token_ids(home: Path) -> None:
    engine = FakeEngine(["", ""], tokenizer=None)
    assert run(home, engine, "-p", "[1, 2,3]").stdout == "100 101 \n"
    assert engine.prompts == [[1, 2, 3]]
    fakes = FakeServices(FakeEngine("x", tokenizer=None))
    result = invoke(main, ["run", "-m", "a-chat-model", "-p", "hello"], fakes, home)
    assert not fakes.opened  # the model is not loaded for nothing
    assert result.exit_code == FAILED and "the prompt must be token ids such as '1 2 3', found 'hello'" in result.stderr
    for name in ("--system", "--stop", "--think"):
        result = invoke(main, ["run", "-m", "a-chat-model", "-p", "1 2", name, "off"], fakes, home)
        assert not fakes.opened and result.exit_code == FAILED and f"{name} needs one" in result.stderr


def test_run_keeps_reasoning_out_of_the_answer(home: Path) -> None:
    reply = [Thought("Hm "), Thought("hm."), "Four."]
    hidden = run(home, FakeEngine(reply), "-p", "Hi")
    assert hidden.stdout == "Four.\n" and "Hm" not in hidden.stderr
    shown = run(home, FakeEngine(reply), "-p", "Hi", "--reasoning", "show")
    assert shown.stdout == "Four.\n" and "Hm hm.\n\n" in shown.stderr
    facts = json.loads(run(home, FakeEngine(reply), "-p", "Hi", "--json").stdout)
    assert (facts["text"], facts["reasoning"], facts["token_ids"]) == ("Four.", "Hm hm.", [100, 101, 102])
    assert "still thinking when it ended" in run(home, FakeEngine([Thought("Hm.")]), "-p", "Hi").stderr


def test_run_passes_the_switch_for_thinking_on(home: Path) -> None:
    engine = FakeEngine("x", "y")
    run(home, engine, "-p", "Hi", "--think", "off")
    assert engine.template_options == [{"enable_thinking": False}]
    for words in (["--think", "high"], ["--think", "on", "--raw"]):
        result = invoke(main, ["run", "-m", "a-chat-model", "-p", "Hi", *words], FakeServices(FakeEngine("x")), home)
        assert result.exit_code == FAILED and len(result.stderr.splitlines()) <= 2


def test_what_is_unusual_about_a_model_is_said_beside_its_plan(home: Path) -> None:
    engine = FakeEngine("x")
    engine.remarks = ("the model has no chat template; conversations are written in the format 'chatml'",)
    assert run(home, engine, "-p", "Hi").stderr.splitlines()[1] == engine.remarks[0]


def test_run_without_a_chat_template_says_so(home: Path) -> None:
    engine = FakeEngine("x")
    engine.chat_template = None
    assert "no chat template" in run(home, engine, "-p", "Hi").stderr
    assert engine.prompts == ["Hi"]


def test_what_closing_an_engine_finds_is_told(home: Path) -> None:
    engine = FakeEngine("x")
    engine.notices = ("memory ran short",)
    engine.close = lambda: setattr(engine, "notices", (*engine.notices, "usage history: cannot be written"))  # type: ignore[method-assign]
    lines = run(home, engine, "-p", "Hi").stderr.splitlines()
    assert [line for line in lines if "memory" in line or "usage" in line] == ["memory ran short", "usage history: cannot be written"]


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(main), "get_command", interrupted)
    result = CliRunner().invoke(main, ["run", "-m", "x"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_ctrl_c_keeps_what_was_written(home: Path) -> None:
    result = run(home, FakeEngine(["half", INTERRUPT, "rest"]), "-p", "Hi")
    assert result.stdout == "half\n" and result.exit_code == INTERRUPTED
    assert "not complete" in result.stderr


@pytest.mark.parametrize(("name", "where"), [(None, "the output"), ("kb.faiss", "kb.faiss")])
def test_a_full_drive_is_told_with_a_remedy(name: str | None, where: str) -> None:
    message = user_message(OSError(errno.ENOSPC, "No space left on device", name))
    assert message is not None and message.startswith(f"{where}: the drive is full: free some space")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_closed_streams_lead_nowhere(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    monkeypatch.setattr(sys, closed, None)
    read = reports_errors(lambda: (sys.stdin.read() if closed == "stdin" else getattr(sys, closed).write("x"), sys.stderr.isatty()))
    assert read()[0] in ("", 1)
    getattr(sys, closed).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "  "], "the prompt is empty"),
        (["-p", "x", "--expert-cache", "lots"], "error: --expert-cache lots: expected auto, a number of experts per layer"),
        (["-p", "x", "--expert-cache", "0"], "error: --expert-cache 0: expected auto"),
        (["-p", "x", "--pin", "3"], "error: --pin 3: expected LAYER:EXPERT, as in 3:17 or 3:17-20"),
        (["-p", "x", "--pin", "3:1,2:9-8"], "error: --pin 2:9-8: expected LAYER:EXPERT"),
        (["-p", "x", "--expert-cache", "0GB"], "error: --expert-cache 0GB: expected auto"),
        (["-p", "x", "--temp", "-1"], "error: --temp -1: expected a number from 0 to 100\n"),
        (["-p", "x", "--temp", "nan"], "error: --temp nan: expected a number from 0 to 100\n"),
        (["-p", "x", "--top-p", "0"], "error: --top-p 0: expected a number above 0 and at most 1\n"),
        (["-p", "x", "--seed", "-1"], "error: --seed -1: expected a whole number of at least 0\n"),
        (["-p", "x", "--top-k", "1.5"], "error: --top-k 1.5: expected a whole number of at least 0\n"),
        (["-p", "x", "--ctx", "0"], "error: --ctx 0: expected a whole number of at least 1\n"),
        (["-p", "x", "--threads", "0"], "error: --threads 0: expected a whole number from 1 to 256\n"),
        (["-p", "x", "--tmep", "1"], "No such option"),
    ],
)
def test_wrong_arguments_exit_with_2(home: Path, arguments: list[str], message: str) -> None:
    result = run(home, FakeEngine("x"), *arguments)
    assert result.exit_code == USAGE and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_users_mistake_is_one_line(home: Path) -> None:
    def refuse(**fields: Any) -> None:
        raise ConfigError("top_p is 7.0,\nexpected 0 to 1 \x1b[2J")

    result = run(home, FakeEngine("x"), "-p", "x", "--top-p", "0.7", sampling=refuse)
    assert result.exit_code == FAILED and result.stderr == "error: top_p is 7.0, expected 0 to 1 ␛[2J\n"


def test_an_unknown_command_gets_a_suggestion() -> None:
    result = CliRunner().invoke(main, ["rnu"])
    assert result.exit_code == USAGE and "no command 'rnu', did you mean 'run'?" in result.stderr


# --- perplexity, verify, info


def test_perplexity(home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    asked: list[Any] = []

    def measure(engine: Any, token_ids: list[int], context_length: int, on_progress: Any, **options: Any) -> Any:
        on_progress("perplexity", 3, 3)
        asked.append((token_ids, context_length, options))
        return SimpleNamespace(ppl=7.25, nll=1.981, n_tok=2)

    arguments = ["perplexity", "a-chat-model", str(text), "--ctx", "64", "--stride", "32"]
    engine = FakeEngine()
    engine.remarks, engine.notices = ("mirror /m: is not there",), ("memory ran short",)
    result = invoke(main, arguments, FakeServices(engine), home, perplexity=measure)
    assert {*engine.remarks, *engine.notices} <= set(result.stderr.splitlines())
    assert result.stdout == "perplexity 7.2500  (negative log-likelihood 1.98100 nats per token, 2 tokens)\n"
    assert asked == [([3, 3, 5], 64, {"stride": 32})]
    result = invoke(main, [*arguments, "--json"], FakeServices(FakeEngine()), home, perplexity=measure)
    assert json.loads(result.stdout) == {"ppl": 7.25, "nll": 1.981, "n_tok": 2}


@pytest.mark.parametrize(("longest", "window"), [(256, 256), (4096, 512)])
def test_perplexity_takes_a_window_that_the_model_has(home: Path, tmp_path: Path, longest: int, window: int) -> None:
    (tmp_path / "text.txt").write_text("one two")
    asked: list[int] = []

    def measure(engine: Any, token_ids: list[int], context_length: int, **options: Any) -> Any:
        asked.append(context_length)
        return SimpleNamespace(ppl=1.0, nll=0.0, n_tok=1)

    fakes = FakeServices(FakeEngine(), longest_context=longest)
    invoke(main, ["perplexity", "a-chat-model", str(tmp_path / "text.txt")], fakes, home, perplexity=measure)
    assert asked == [window] and fakes.opened[0][1]["context_length"] == window


def test_perplexity_refuses_what_is_not_utf8(home: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    result = invoke(main, ["perplexity", "a-chat-model", str(tmp_path / "latin.txt")], FakeServices(FakeEngine()), home)
    assert result.exit_code == FAILED and "is not UTF-8 (byte 3 is 0xe9)" in result.stderr


def fake_manifest() -> SimpleNamespace:
    types = {"gate_proj": "q4_k", "up_proj": "q4_k", "down_proj": "q6_k"}
    layer = SimpleNamespace(num_experts=8, expert_bytes=4096, parts={name: SimpleNamespace(type=type) for name, type in types.items()})
    return SimpleNamespace(
        kind="decoder", family="qwen2_moe", format_version="1.0", quantization={"recipe": "q4_k_m"}, tokenizer=None,
        files={"dense.safetensors": SimpleNamespace(bytes=2048)}, source={"name": "Demo"}, converter_version="0.1.0",
        tensors={"a": SimpleNamespace(type="f32"), "b": SimpleNamespace(type="f32")}, experts={0: layer, 1: layer},
        config={"hidden_size": 64, "num_experts": 8},
    )  # fmt: skip


def test_verify_and_info(home: Path) -> None:
    fakes = FakeServices()
    result = invoke(main, ["verify", "a-chat-model"], fakes, home, verify=lambda path, report: fake_manifest())
    assert result.stdout.endswith("a-chat-model: 1 files, 2.0 kB, all as recorded\n")

    def damaged(path: Path, report: Any) -> None:
        raise FormatError(f"{path}: its contents are damaged")

    assert invoke(main, ["verify", "a-chat-model"], fakes, home, verify=damaged).exit_code == FAILED
    result = invoke(main, ["info", "a-chat-model"], fakes, home, read_manifest=lambda path: fake_manifest())
    assert "expert layers  2 layers of 8 experts, 4.1 kB each (q4_k, q4_k, q6_k)" in result.stdout
    assert "tokenizer" not in result.stdout
    result = invoke(main, ["info", "a-chat-model", "--json"], fakes, home, read_manifest=lambda path: fake_manifest())
    assert json.loads(result.stdout)["family"] == "qwen2_moe"


def test_info_without_a_model_lists_them(home: Path, tmp_path: Path) -> None:
    def read(path: Path) -> SimpleNamespace:
        if path.name == "a-embed-model":
            raise FormatError("colibri.json is damaged")
        return fake_manifest()

    result = invoke(main, ["info"], FakeServices(), home, read_manifest=read)
    assert result.exit_code == 0
    assert result.stdout == "a-chat-model   decoder, qwen2_moe, q4_k_m, 2.0 kB\na-embed-model  colibri.json is damaged\n"
    facts = json.loads(invoke(main, ["info", "--json"], FakeServices(), home, read_manifest=read).stdout)
    assert [entry["name"] for entry in facts["models"]] == ["a-chat-model", "a-embed-model"]
    assert "no models in" in invoke(main, ["info"], FakeServices(), tmp_path / "empty").stdout


def test_a_model_that_is_not_there_is_told_with_those_that_are(home: Path) -> None:
    result = invoke(main, ["info", "nosuch"], FakeServices(), home)
    assert result.exit_code == FAILED and f"no model at nosuch, and {home / 'models'} has a-chat-model, a-embed-model:" in result.stderr


# --- colibri-ingest


def report(**changes: Any) -> SimpleNamespace:
    empty: dict[str, Any] = {name: [] for name in ("added", "changed", "moved", "removed", "unchanged", "skipped", "ignored")}
    return SimpleNamespace(**empty | {"n_chunks": 3, "n_embedded": 2, "cancelled": False} | changes)


def test_ingest_reports_what_it_did(home: Path, tmp_path: Path) -> None:
    base = FakeKnowledgeBase(report=report(added=["a.md"], moved=[("b.md", "c.md")], unchanged=["d"]))
    arguments = [str(tmp_path), "--collection", "work", "--keep-missing", "--dry-run"]
    result = invoke(ingest.main, arguments, FakeServices(None, base), home)
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "added    a.md\nmoved    b.md -> c.md\nwould be: 1 added, 0 changed, 1 moved, 0 removed, 1 unchanged, 0 skipped"
    )
    (asked,) = base.ingested
    assert asked.pop("cancel").is_set() is False
    assert asked == {"paths": [str(tmp_path)], "dry_run": True, "remove_missing": False, "collection": "work"}
    assert base.closed


def test_ingest_names_ignored_folders_only(home: Path, tmp_path: Path) -> None:
    ignored = [SimpleNamespace(path=str(tmp_path), reason="is a link"), SimpleNamespace(path="a.png", reason="type")]
    result = invoke(ingest.main, [str(tmp_path)], FakeServices(None, FakeKnowledgeBase(report=report(ignored=ignored))), home)
    assert result.exit_code == 0 and "2 ignored" in result.stdout and result.stderr == f"ignored {tmp_path}: is a link\n"


def test_the_time_that_is_left_goes_by_the_rate_so_far() -> None:
    times = iter([0.0, 1.0, 10.0, 20.0, 30.0])
    remaining = ingest.Remaining(lambda: next(times))
    texts = [remaining.text(done, 10_000) for done in (0, 10, 100, 5_000, 10_000)]
    assert texts == ["", "", ", about 16 min left", ", about 20 s left", ""]


def test_a_dry_run_opens_only_what_is_there(home: Path, tmp_path: Path) -> None:
    opened: list[tuple[Path, bool]] = []

    def open_base(folder: Path, encoder: Any, create: bool = False) -> FakeKnowledgeBase:
        opened.append((folder, create))
        return FakeKnowledgeBase(report=report())

    for arguments in (["--dry-run"], ["--dry-run", "--kb", str(tmp_path / "new")], ["--kb", str(tmp_path / "new")]):
        invoke(ingest.main, [str(tmp_path), *arguments], FakeServices(), home, open_knowledge_base=open_base)
    assert opened == [(home / "kb" / "default", False), (Path(":memory:"), False), (tmp_path / "new", True)]


def test_ingest_names_each_skipped_file_and_exits_with_4(home: Path, tmp_path: Path) -> None:
    base = FakeKnowledgeBase(report=report(skipped=[SimpleNamespace(path="bad\x1b.pdf", reason="is damaged")]))
    result = invoke(ingest.main, [str(tmp_path)], FakeServices(None, base), home)
    assert result.exit_code == SKIPPED and result.stderr == "skipped bad␛.pdf: is damaged\n"
    result = invoke(ingest.main, [str(tmp_path), "--json"], FakeServices(None, base), home)
    assert result.exit_code == SKIPPED and json.loads(result.stdout)["skipped"] == [{"path": "bad\x1b.pdf", "reason": "is damaged"}]


def test_an_interrupted_ingest_says_what_happens_next(home: Path, tmp_path: Path) -> None:
    result = invoke(ingest.main, [str(tmp_path)], FakeServices(None, FakeKnowledgeBase(report=report(cancelled=True))), home)
    assert result.exit_code == INTERRUPTED and "the next run goes on from there" in result.stderr


def test_ingest_refuses_addresses_and_what_is_not_there(home: Path) -> None:
    for path, message in (("https://example.org/a", "colibri never downloads"), ("nowhere", "nowhere does not exist")):
        result = invoke(ingest.main, [path], FakeServices(), home)
        assert result.exit_code == FAILED and message in result.stderr


# --- colibri-chat


def chat_once(home: Path, base: FakeKnowledgeBase | None, engine: FakeEngine, *arguments: str, stdin: str | None = None) -> Result:
    return invoke(chat.main, arguments, FakeServices(engine, base), home, stdin)


def test_once_answers_and_exits(home: Path) -> None:
    base, engine = FakeKnowledgeBase(fake_hit("a.md", "text")), FakeEngine(["So it is [1]."])
    result = chat_once(home, base, engine, "--once", "How?", "--scope", "docs", "--temp", "0.2", "-n", "20")
    assert result.exit_code == 0 and result.stdout == "So it is [1].\n[1]\ta.md:1\n"
    (asked,) = base.asked
    assert (asked["question"], asked["scope"], asked["max_tokens"], asked["sampling"].temperature) == ("How?", "docs", 20, 0.2)
    assert engine.closed and base.closed


def test_once_tells_by_its_exit_code_that_the_documents_do_not_say(home: Path) -> None:
    result = chat_once(home, FakeKnowledgeBase(answered=False), FakeEngine(), "--once", "How?")
    assert result.exit_code == NOT_IN_DOCUMENTS and result.stdout == "The documents do not say.\n"
    # the model itself finds that the sources have no answer
    result = chat_once(home, FakeKnowledgeBase(fake_hit("a.md", "text")), FakeEngine(["The documents ", "do not say."]), "--once", "How?")
    assert result.exit_code == NOT_IN_DOCUMENTS


def test_once_tells_which_citations_the_model_did_not_write(home: Path) -> None:
    base = FakeKnowledgeBase(fake_hit("a.md", "Bread rises slowly in a cold kitchen."))
    pieces = ["Bread rises slowly in a cold kitchen."]
    result = chat_once(home, base, FakeEngine(pieces), "--once", "How?")
    assert result.stdout.startswith("Bread rises slowly in a cold kitchen [1].\n") and "comparing words" in result.stderr
    result = chat_once(home, base, FakeEngine(pieces), "--once", "How?", "--json")
    assert json.loads(result.stdout)["matched_citations"] == [1]


def test_once_gives_json_for_programs(home: Path) -> None:
    base = FakeKnowledgeBase(fake_hit("a.md", "text", ("Top", "Sub"), 7))
    result = chat_once(home, base, FakeEngine(["So [1][5]."]), "--once", "-", "--json", stdin="How?\n")
    facts = json.loads(result.stdout)
    assert (facts["answer"], facts["in_documents"], facts["unknown_citations"]) == ("So [1][5?].", True, [5])
    (source,) = facts["sources"]
    assert source == {
        "number": 1, "path": "a.md", "heading": "Top > Sub", "line": 7, "page": None, "score": 0.03, "text": "text", "cited": True
    }  # fmt: skip


def test_once_that_is_stopped_exits_with_130(home: Path) -> None:
    result = chat_once(home, FakeKnowledgeBase(fake_hit("a.md", "t")), FakeEngine(["half", INTERRUPT, "x"]), "--once", "How?")
    assert result.exit_code == INTERRUPTED and result.stdout.startswith("half\n")


def test_a_pipe_asks_one_question_a_line(home: Path) -> None:
    engine = FakeEngine(["one"], ["two"])
    result = chat_once(home, None, engine, "--no-rag", stdin="first\n/help\nsecond\n")
    assert result.exit_code == 0 and result.stdout.startswith("one\n") and result.stdout.endswith("two\n")
    assert engine.prompts[1] == [
        {"role": "user", "content": "first"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "second"}
    ]  # fmt: skip


def test_without_a_model_questions_search(tmp_path: Path) -> None:
    home = make_home(tmp_path, chat=False)
    base = FakeKnowledgeBase(fake_hit("a.md", "the text"))
    result = chat_once(home, base, FakeEngine(), stdin="where?\n")
    assert "[1]\ta.md:1\n" in result.stdout and "the text" in result.stdout
    result = chat_once(home, base, FakeEngine(), "--once", "where?")
    assert result.exit_code == FAILED and "no chat model" in result.stderr and "bootstrap.py demo" in result.stderr


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("kb", "no knowledge base in"),
        ("embed", "no embedder"),
        ("chat", "no chat model"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, missing: str, message: str) -> None:
    home = make_home(tmp_path, **{missing: False})
    result = chat_once(home, FakeKnowledgeBase(), FakeEngine(), "--once", "q")
    assert result.exit_code == FAILED and len(result.stderr.splitlines()) == 1
    assert message in result.stderr and "`" in result.stderr


def test_chat_refuses_contradictions(home: Path) -> None:
    for arguments in (["--json"], ["--no-rag", "--scope", "x", "--once", "q"], ["--once", " "]):
        assert chat_once(home, None, FakeEngine(), *arguments).exit_code == USAGE


def test_what_was_opened_is_closed_when_the_model_fails(home: Path) -> None:
    base = FakeKnowledgeBase()

    def refuse(path: Path, **options: Any) -> None:
        raise FormatError("damaged")

    services = FakeServices(None, base).services(home)
    services = type(services)(**vars(services) | {"open_engine": refuse})
    assert CliRunner().invoke(chat.main, ["--once", "q"], obj=services).exit_code == FAILED
    assert base.closed


# --- help


def test_every_command_and_option_is_documented() -> None:
    commands = [main.get_command(None, name) for name in COMMANDS] + [chat.main, ingest.main]  # type: ignore[arg-type]
    for command in commands:
        text = CliRunner().invoke(command, ["--help"]).output  # type: ignore[arg-type]
        assert "Exit codes:" in text and "130" in text
        for parameter in command.params:  # type: ignore[union-attr]
            if parameter.param_type_name == "option":
                assert parameter.help, parameter.name  # type: ignore[attr-defined]
                assert parameter.opts[-1] in text
            else:
                assert parameter.make_metavar(SimpleNamespace()).strip("[]") in text  # type: ignore[arg-type]
    overview = CliRunner().invoke(main, ["--help"]).output
    assert all(name in overview for name in COMMANDS)
