"""Full transcripts of conversations: keys in, text out."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import (
    DENSE_STATS,
    FAKE_STATS,
    INTERRUPT,
    FakeEngine,
    FakeKnowledgeBase,
    FakeSampling,
    FakeServices,
    Thought,
    fake_hit,
    make_home,
)
from colibri_cli.generation import stats_dict, stats_line, stats_lines
from colibri_cli.repl.editor import Editor, PipeReader
from colibri_cli.repl.loop import run_loop
from colibri_cli.repl.render import Renderer
from colibri_cli.repl.state import ReplState
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from libcolibri.stats import PhaseStats

HITS = (
    fake_hit("notes/cpu.md", "The cache holds experts.\nIt is in memory.", ("Engine", "Cache"), 12),
    fake_hit("notes/disk.md", "Experts are read from disk.", (), 3, cosine=0.81, copies=(("old.md", 4),)),
)


class Conversation:
    """A state over fakes, and everything printed."""

    def __init__(self, home: Path, *replies: Any, documents: bool = True, model: bool = True, answered: bool = True, width: int = 80):
        self.engine = FakeEngine(*replies)
        self.knowledge_base: Any = FakeKnowledgeBase(*HITS, answered=answered) if documents else None
        fakes = FakeServices(self.engine, self.knowledge_base)
        self.state = ReplState(fakes.services(home, sampling=FakeSampling), knowledge_base=self.knowledge_base)
        if model:
            self.state.open_model(home / "models" / "a-chat-model")
        self.out = io.StringIO()
        self.terminal = Renderer(
            Console(file=self.out, force_terminal=True, color_system=None, width=width, markup=False, emoji=False),
            Console(file=self.out, width=width, markup=False, emoji=False),
        )
        self.plain = Renderer.for_streams(self.out, self.out)

    def keys(self, *messages: str, enter: bool = True) -> str:
        """Type each message, then leave with Ctrl-D; the text on the screen."""
        with create_pipe_input() as keyboard:
            keyboard.send_text("".join(message + ("\r" if enter else "") for message in messages) + "\x04")
            run_loop(self.state, Editor(self.state, None, input=keyboard, output=DummyOutput()), self.terminal)
        return self.out.getvalue()

    def pipe(self, text: str) -> str:
        run_loop(self.state, PipeReader(io.StringIO(text)), self.plain)
        return self.out.getvalue()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path)


def test_an_answer_shows_its_text_its_sources_and_its_timing(home: Path) -> None:
    talk = Conversation(home, ["The cache ", "holds ", "experts [1]", "."])
    screen = talk.keys("Where are experts?")
    assert "The cache holds experts [1].\n" in screen
    assert re.search(r"\[1\]\s+notes/cpu.md:12\s+Engine > Cache", screen)
    assert "notes/disk.md" not in screen  # not cited
    assert "3 tokens at 4.0/s" in screen and "expert hit rate 75 %" in screen
    assert talk.state.turns[0].cited == (1,)


def test_unknown_citations_are_marked_not_hidden(home: Path) -> None:
    screen = Conversation(home, ["It is so [7][2]."]).keys("Why?")
    assert "It is so [7?][2]." in screen
    assert "The answer cites [7], which is not among the sources." in screen


def test_the_second_question_carries_the_history(home: Path) -> None:
    talk = Conversation(home, ["One [1]."], ["Two [2]."])
    talk.keys("first", "second")
    assert talk.knowledge_base.asked[1]["history"] == [{"role": "user", "content": "first"}, {"role": "assistant", "content": "One [1]."}]


def test_when_the_documents_do_not_say_the_answer_says_so(home: Path) -> None:
    talk = Conversation(home, answered=False)
    screen = talk.keys("What is the meaning of life?")
    assert "The documents do not say." in screen
    assert talk.state.turns[0].in_documents is False
    assert talk.engine.prompts == []  # the model was not asked


def test_ctrl_c_stops_the_answer_only_and_keeps_what_was_written(home: Path) -> None:
    talk = Conversation(home, ["half ", "an ", INTERRUPT, "answer"], ["whole"])
    screen = talk.keys("first", "second")
    assert "half an" in screen and "answer is not complete" in screen
    assert [turn.answer for turn in talk.state.turns] == ["half an ", "whole"]
    assert talk.state.turns[0].finish_reason == "cancelled"


def test_ctrl_c_at_the_prompt_does_not_leave(home: Path) -> None:
    talk = Conversation(home, ["yes"])
    with create_pipe_input() as keyboard:
        keyboard.send_text("half\x03again\r\x04")
        run_loop(talk.state, Editor(talk.state, None, input=keyboard, output=DummyOutput()), talk.terminal)
    assert [turn.question for turn in talk.state.turns] == ["again"]


def test_a_paste_keeps_its_lines(home: Path) -> None:
    talk = Conversation(home, ["ok"])
    talk.keys("\x1b[200~line one\r\nline two\nline three\x1b[201~")
    assert talk.state.turns[0].question == "line one\nline two\nline three"


def test_commands_typed_while_something_runs_are_run_one_by_one(home: Path) -> None:
    talk = Conversation(home, ["ok"])
    screen = talk.keys("/set temperature 0.5\n/help open\nwhat is it?\n\nor not?\n/set top-k 3\n/quit\n/set top-k 4")
    assert talk.state.sampling == {"temperature": 0.5, "top_k": 3} and "/open N" in screen
    assert [turn.question for turn in talk.state.turns] == ["what is it?\n\nor not?"]


def test_a_text_with_a_command_in_it_is_one_question(home: Path) -> None:
    talk = Conversation(home, ["ok"])
    talk.keys("\x1b[200~what does this do?\n/help\x1b[201~")
    assert [turn.question for turn in talk.state.turns] == ["what does this do?\n/help"]


def test_ctrl_j_and_alt_enter_start_a_new_line(home: Path) -> None:
    talk = Conversation(home, ["ok"])
    talk.keys("one\x0atwo\x1b\rthree")
    assert talk.state.turns[0].question == "one\ntwo\nthree"


def test_wide_characters_pass_through(home: Path) -> None:
    talk = Conversation(home, ["缓存", "在内存里 [1]。"], width=20)
    screen = talk.keys("专家在哪里？")
    assert talk.state.turns[0].question == "专家在哪里？"
    assert "缓存在内存里 [1]。" in screen


def test_empty_input_asks_again(home: Path) -> None:
    talk = Conversation(home)
    assert talk.keys("", "   ", "\t") == ""
    assert talk.state.turns == []


def test_an_unknown_command_gets_a_suggestion(home: Path) -> None:
    screen = Conversation(home).keys("/serach cache", "/xyzzy", "/s")
    assert "no command /serach: did you mean /search?" in screen
    assert "no command /xyzzy: /help lists them" in screen
    assert "no command /s: did you mean /sources or /search" in screen


def test_a_path_at_the_beginning_is_a_question(home: Path) -> None:
    talk = Conversation(home, ["a table of drives"])
    talk.keys("/etc/fstab: what is it?")
    assert talk.state.turns[0].question == "/etc/fstab: what is it?"


def test_help_lists_what_can_be_done_now(home: Path) -> None:
    screen = Conversation(home).keys("/help")
    assert "/search QUERY" in screen and "/quit" in screen
    assert re.search(r"Not now: .*/sources.*/why", screen)
    screen = Conversation(home, documents=False).keys("/help open", "/search x")
    assert "not now: it needs sources" in screen
    assert "/search needs a knowledge base" in screen


def test_sources_open_and_why(home: Path) -> None:
    talk = Conversation(home, ["Here [2]."])
    screen = talk.keys("where", "/sources", "/open 1", "/open 2", "/why", "/why 2", "/open 9", "/open")
    assert re.search(r"\[2\]\*\s+notes/disk.md:3", screen) and re.search(r"\[1\]\s+notes/cpu.md:12", screen)
    assert "  The cache holds experts.\n  It is in memory.\n" in screen
    assert "the same stands in old.md:4" in screen
    assert "Found for: where" in screen
    assert re.search(r"\[2\]\s+disk.md:3\s+1 \(4\.500\)\s+1 \(0\.810\)\s+0\.50\s+0\.0300", screen)
    assert "'9' is not the number of a source, expected 1 to 2" in screen
    assert "which one? /open N" in screen


def test_why_in_a_narrow_window(home: Path) -> None:
    screen = Conversation(home, ["Here [2]."], width=40).keys("where", "/why 2")
    assert "[2] disk.md:3\n  words 1 (4.500), meaning 1 (0.810)," in screen and "together 0.0300" in screen


def test_search_works_without_a_model_and_feeds_open_and_why(home: Path) -> None:
    talk = Conversation(home, model=False)
    screen = talk.keys("/search cache", "/open 2", "/why", "/stats", "a question")
    assert "[1] notes/cpu.md:12  Engine > Cache" in screen
    assert "Experts are read from disk." in screen
    assert "/stats needs an answer by the model" in screen
    assert talk.knowledge_base.searched == [("cache", None), ("a question", None)]


def test_stats_show_prompt_answer_and_the_plan(home: Path) -> None:
    screen = Conversation(home, ["x"], width=120).keys("q", "/stats")
    assert "prompt      6 tokens read in 5.00 s" in screen and "answer      3 tokens" in screen and "plan: 1.0 GB dense" in screen


def test_another_model_has_no_stats_of_the_one_before(home: Path) -> None:
    screen = Conversation(home, ["x"]).keys("q", f"/model {home / 'models' / 'a-chat-model'}", "/stats")
    assert "/stats needs an answer by the model" in screen


def test_stopped_before_the_first_token() -> None:
    stopped = replace(FAKE_STATS, completion_tok=0, decode=PhaseStats(), prompt_tok=20)
    assert "no token written; 10 of 20 prompt tokens read" in stats_line(stopped)
    lines = stats_lines(stopped, FakeEngine())
    assert lines[0].endswith("4 more were known from before; 10 not read") and lines[-1] == "answer      no token written"


def test_a_single_token_has_no_rate_and_a_dense_model_no_hit_rate() -> None:
    assert stats_line(DENSE_STATS) == "1 token after 0.50 s (1 prompt token)"
    numbers = stats_dict(DENSE_STATS)
    assert numbers["expert_hit_rate"] is None and numbers["prefill"]["experts"]["hit_rate"] is None
    assert stats_lines(DENSE_STATS, FakeEngine()) == [
        "prompt      1 token read in 0.40 s, 2.5 tokens/s",
        "  possible  50 % reached: going through 2.0 GB at 10.0 GB/s, memory's best, takes 0.20 s",
        "answer      1 token, the first after 0.50 s",
    ]


def test_a_long_prompt_in_memory_has_no_share_of_the_possible() -> None:
    lines = stats_lines(replace(DENSE_STATS, prompt_tok=90, prefill=PhaseStats(90, 1, 0.4, 2_000_000_000)), FakeEngine())
    assert lines[1].startswith("  possible  not known: limited by arithmetic")


def test_reset_forgets_and_retry_asks_again(home: Path) -> None:
    talk = Conversation(home, ["one"], ["two"], ["three"])
    talk.keys("q", "/retry", "/reset", "r")
    assert [turn.answer for turn in talk.state.turns] == ["three"]
    assert talk.knowledge_base.asked[1] == talk.knowledge_base.asked[0] | {"cancel": talk.knowledge_base.asked[1]["cancel"]}
    assert talk.engine.resets == 1 and talk.knowledge_base.asked[2]["history"] == []


def test_retry_that_fails_keeps_the_old_answer(home: Path) -> None:
    talk = Conversation(home, ["one"], [OSError(5, "disk gone", "experts")])
    screen = talk.keys("q", "/retry")
    assert "error: experts: disk gone" in screen
    assert [turn.answer for turn in talk.state.turns] == ["one"]


def test_settings_are_shown_changed_and_checked(home: Path) -> None:
    talk = Conversation(home, ["x"])
    screen = talk.keys("/set temperature 0.7", "/set top-k many", "/set warmth 3", "/set max-tokens 0", "/set max-tokens 50", "q")
    assert "top-k is 'many', expected a whole number" in screen
    assert "no setting 'warmth', expected one of temperature," in screen
    assert "max-tokens is 0, expected at least 1" in screen
    assert talk.knowledge_base.asked[0]["sampling"] == FakeSampling(temperature=0.7)
    assert talk.knowledge_base.asked[0]["max_tokens"] == 50


def test_save_and_resume(home: Path, tmp_path: Path) -> None:
    talk = Conversation(home, ["Here [2]."])
    screen = talk.keys("where", "/save trip", "/save ../x", f"/save {tmp_path / 'talk.md'}")
    assert "'../x' is no name for a conversation" in screen
    assert (tmp_path / "talk.md").read_text() == "## where\n\nHere [2].\n\n- [2] notes/disk.md:3 \n"
    other = Conversation(home, ["more"])
    screen = other.keys("/resume", "/resume nothing", "/resume trip", "/sources", "next")
    assert "saved: trip" in screen and "no saved conversation 'nothing'" in screen and "resumed trip: 1 questions" in screen
    assert re.search(r"\[2\]\*\s+notes/disk.md:3", screen)
    assert other.knowledge_base.asked[0]["history"][1]["content"] == "Here [2]."


def test_a_damaged_saved_conversation_is_an_error_in_one_line(home: Path) -> None:
    (home / "conversations").mkdir()
    (home / "conversations" / "bad.json").write_text('{"turns": [1], "scope": null}')
    assert "bad.json is not a saved conversation" in Conversation(home).keys("/resume bad")


def test_a_model_that_cannot_be_opened_leaves_the_old_one_in_use(home: Path) -> None:
    talk = Conversation(home, ["x"])
    screen = talk.keys("/model nix", "/model", "q")
    assert "no model at nix" in screen and "a-chat-model" in screen
    assert talk.state.turns[0].answer == "x" and not talk.engine.closed


def test_quit_leaves_at_once(home: Path) -> None:
    talk = Conversation(home, ["never"])
    talk.keys("/quit")
    assert talk.state.running is False and talk.state.turns == []


def test_escape_sequences_never_reach_the_terminal(home: Path) -> None:
    talk = Conversation(home, ["evil \x1b]0;title\x07 \x1b", "[2J \x9b31m \u202egnp.exe \r end"])
    talk.knowledge_base.hits = [fake_hit("a\x1b[31m.md", "text \x1b[2J here", ("He\x07ad",), 1)]
    screen = talk.keys("q", "/sources", "/open 1", "/search x", "/why")
    assert not set("\x1b\x07\x9b\u202e\r") & set(screen)
    assert "␛]0;title␇" in screen


def test_a_pipe_gets_plain_text_as_it_comes(home: Path) -> None:
    talk = Conversation(home, ["**bold** line\n| a | b |\n", "end [1]"])
    out = talk.pipe("\ufeffquestion one\n\n/sources\n")
    assert talk.state.turns[0].question == "question one"
    assert "**bold** line\n| a | b |\nend [1]\n" in out
    assert "[1]*\tnotes/cpu.md:12\tEngine > Cache\n" in out


def test_an_error_ends_the_turn_not_the_conversation(home: Path) -> None:
    from libcolibri.errors import ContextLengthError

    talk = Conversation(home, [ContextLengthError(5000, 4096)], ["fine"])
    screen = talk.keys("long", "short")
    assert "error: the prompt has 5000 tokens, the context holds 4096" in screen
    assert [turn.answer for turn in talk.state.turns] == ["fine"]


def test_completion_comes_from_the_table(home: Path) -> None:
    from colibri_cli.repl.editor import SlashCompleter
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    talk = Conversation(home, ["x"])
    talk.keys("q")

    def complete(text: str) -> list[str]:
        return [found.text for found in SlashCompleter(talk.state).get_completions(Document(text), CompleteEvent())]

    assert complete("/s") == ["sources", "search", "scope", "set", "save", "stats"]
    assert complete("/open ") == ["1", "2"]
    assert complete("/set t") == ["temperature", "top-k", "top-p"]
    assert complete("/scope n") == ["notes"]
    assert complete("plain") == []


# ---- reasoning


def test_reasoning_is_shown_before_the_answer_and_is_no_part_of_it(home: Path) -> None:
    talk = Conversation(home, [Thought("I look "), Thought("at [1]."), "Four [1]."], ["Five."], documents=False)
    talk.state.show_reasoning = True  # the notes of these tests are no terminal
    screen = talk.keys("How many?", "And now?")
    assert "I look at [1]." in screen and screen.index("I look at") < screen.index("Four [1].")
    assert talk.state.turns[0].answer == "Four [1]."
    assert talk.engine.prompts[1][:2] == [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four [1]."}]


def test_reasoning_stays_out_of_a_pipe_unless_asked_for(home: Path) -> None:
    assert "Hm." not in Conversation(home, [Thought("Hm."), "Four."], documents=False).pipe("How many?\n")
    shown = Conversation(home, [Thought("Hm."), "Four."], documents=False).pipe("/think show\nHow many?\n")
    assert "thinking: the model's own default; reasoning is shown\n" in shown and "Hm.\n\nFour.\n" in shown
    hidden = Conversation(home, [Thought("Hm."), "Four."], documents=False)
    assert "Hm." not in hidden.keys("/think hide", "How many?")


def test_documents_are_answered_without_thinking_unless_asked_for(home: Path) -> None:
    talk = Conversation(home, ["One [1]."], [Thought("Hm [7]."), "Two [2]."])
    screen = talk.pipe("first\n/think on\nsecond\n")
    assert talk.engine.template_options == [{"enable_thinking": False}, {"enable_thinking": True}]
    assert talk.state.turns[1].answer == "Two [2]." and talk.state.turns[1].unknown == ()
    assert "thinking: on" in screen


def test_chat_without_documents_thinks_as_the_model_does(home: Path) -> None:
    talk = Conversation(home, ["One."], ["Two."], documents=False)
    talk.pipe("first\n/think off\nsecond\n")
    assert talk.engine.template_options == [{}, {"enable_thinking": False}]


def test_settings_of_thinking_are_checked(home: Path) -> None:
    talk = Conversation(home, documents=False)
    screen = talk.pipe("/think high\n/think maybe\n/think\n")
    assert "error: this model's chat template knows no effort of thinking" in screen
    assert "error: /think maybe: expected one of on, off, low, medium, high, show, hide" in screen
    assert talk.state.thinking is None
    talk.engine.chat_template = None
    assert "/think needs a model with a chat template" in talk.pipe("/think on\n")


def test_an_answer_that_was_only_thought_says_so(home: Path) -> None:
    screen = Conversation(home, [Thought("Hm.")], documents=False).pipe("How many?\n")
    assert "[the model was still thinking when it was cut: /think off" in screen


def test_a_new_model_that_knows_no_such_setting_thinks_by_its_default(home: Path) -> None:
    talk = Conversation(home, documents=False)
    talk.state.thinking = "high"
    screen = talk.pipe("/model a-chat-model\n")
    assert "/think high does not apply any more" in screen and talk.state.thinking is None
