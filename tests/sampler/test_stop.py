"""Stop strings over any cutting of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libcolibri.errors import ConfigError
from libcolibri.stop import StopStrings


@given(parts=st.lists(st.text("abc", max_size=4), max_size=12), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_any_cutting(parts, stop):
    matcher, shown, text = StopStrings(stop), "", "".join(parts)
    for part in parts:
        emitted, stopped = matcher.push(part)
        shown += emitted
        if stopped:
            break
    shown += matcher.flush()
    # The text up to the stop string that is complete first; among those ending together, the one that starts first.
    seen = next((text[: i + 1] for i in range(len(text)) if any(text[: i + 1].endswith(s) for s in stop)), None)
    if seen is None:
        assert (shown, matcher.stopped) == (text, False)
    else:
        assert matcher.stopped
        assert not any(string in shown for string in stop)
        assert text.startswith(shown)
        assert any(text[len(shown) :].startswith(string) for string in stop)


def test_only_a_possible_beginning_is_held_back():
    matcher = StopStrings(["</end>"])
    assert matcher.push("abc <") == ("abc ", False)
    assert matcher.push("/en") == ("", False)
    assert matcher.push("x") == ("</enx", False)
    assert matcher.push("</end>tail") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end():
    matcher = StopStrings("stop")
    assert matcher.push("st") == ("", False)
    assert matcher.flush() == "st"


@pytest.mark.parametrize("stop", [[""], [1], ["a", ""], ""])
def test_empty_or_foreign_strings(stop):
    with pytest.raises(ConfigError):
        StopStrings(stop)
