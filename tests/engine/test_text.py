import checkpoints
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import RequestStats, TokenEvent
from eagle_rt.engine.text import Reply

TOKENIZER = checkpoints.byte_tokenizer()


def stream(text: str, chunk: int, stop: tuple[str, ...] = ()) -> tuple[Reply, list[str]]:
    """Feed a text's byte tokens in chunks; the reply and its deltas."""
    tokens = TOKENIZER.encode(text)
    reply = Reply(TOKENIZER, SamplingParams(stop=stop), [9])
    deltas = []
    for start in range(0, len(tokens), chunk):
        is_last = start + chunk >= len(tokens)
        reason = {"type": "length", "length": len(tokens)} if is_last else None
        deltas.append(reply.push(TokenEvent("r", tokens[start : start + chunk], RequestStats(), reason)).text)
    return reply, deltas


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.integers(1, 5))
def test_streamed_text_is_the_text(text: str, chunk: int) -> None:
    expected = TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True)
    reply, deltas = stream(text, chunk)
    assert reply.text == "".join(deltas) == expected
    assert not any("\ufffd" in delta for delta in deltas[:-1] if "\ufffd" not in expected)


@given(
    st.text("abc", min_size=1, max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_cut_at_the_first_place(text: str, stop: list[str], chunk: int) -> None:
    reply, deltas = stream(text, chunk, tuple(stop))
    ends = [text.find(one) + len(one) for one in stop if one in text]
    assert "".join(deltas) == reply.text
    if ends:
        # The stop string that is complete first decides; nothing of it is ever shown.
        end = min(ends)
        assert len(reply.tokens) == end
        assert reply.finish_reason["type"] == "stop"
        assert text.startswith(reply.text)
        assert reply.text + reply.finish_reason["matched"] == text[:end] or reply.finish_reason["matched"] in text[:end]
    else:
        assert reply.text == text
        assert reply.finish_reason["type"] == "length"


def test_events_after_the_end_change_nothing() -> None:
    reply, _ = stream("hello stop and more", 100, ("stop",))
    assert reply.text == "hello "
    assert reply.push(TokenEvent("r", [40], RequestStats())).text == ""
    assert reply.text == "hello "
    assert reply.finish_reason == {"type": "stop", "matched": "stop"}


@pytest.mark.parametrize("stop", ["ing", "zing a"])
def test_text_that_may_become_a_stop_string_is_held_back(stop: str) -> None:
    reply, deltas = stream("amazing art", 1, (stop,))
    assert not any(delta.endswith(stop[0]) for delta in deltas)
    assert reply.text == "amazing art"[: "amazing art".find(stop)]
