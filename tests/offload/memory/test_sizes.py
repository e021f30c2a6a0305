"""offload/memory/sizes: reading and writing byte sizes."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.memory.sizes import format_bytes, parse_bytes, round_up

positive = st.integers(1, 1 << 62)


READ = {
    "1 4096 512b": (1, 4096, 512),
    "1k 1kb 1KiB": (1024, 1000, 1024),
    "4GiB 4gib 512MB": (4 << 30, 4 << 30, 512 * 10**6),
    "1.5g 0.5KiB": (3 << 29, 512),
    "2T 1tb": (2 << 40, 10**12),
}


def test_sizes_are_read_as_written():
    for texts, wanted in READ.items():
        assert tuple(map(parse_bytes, texts.split())) == wanted
    assert parse_bytes("512 MB") == 512 * 10**6
    assert parse_bytes("  2\tm ") == 2 << 20
    assert parse_bytes(7) == 7


NO_SIZES = "g GiB 4Gi 4.GiB .5g 1e9 -1 +1 4_000 4,5g nan inf 0x10 \N{ARABIC-INDIC DIGIT FOUR}g"


def test_what_is_no_positive_size_is_quoted_in_the_error():
    for bad in ("", " ", "4 apples", "4 GiB 2", *NO_SIZES.split()):
        with pytest.raises(ValueError, match=re.escape(repr(bad)) + ".*'4GiB'"):
            parse_bytes(bad)
    for bad in (None, 1.5, 4e9, True, b"4g", ["4g"], 0, -1, "0 GiB", "0.1"):
        with pytest.raises(ValueError, match=re.escape(repr(bad))):
            parse_bytes(bad)


@given(positive)
def test_whole_bytes_are_exact(nbytes):
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes} B") == nbytes


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,400}\.?[0-9]*[kmgtb]*", fullmatch=True))
@example("9" * 400)
@example("1" + "0" * 330 + "g")
def test_any_text_gives_a_positive_int_or_a_value_error(text):
    try:
        nbytes = parse_bytes(text)
    except ValueError:
        return
    assert type(nbytes) is int
    assert nbytes > 0


def test_sizes_are_written_with_a_binary_unit():
    small = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", -1536: "-1.5 KiB"}
    large = {4 << 30: "4.0 GiB", 3 << 40: "3.0 TiB", 2048 << 40: "2048.0 TiB"}
    for nbytes, text in {**small, **large}.items():
        assert format_bytes(nbytes) == text


@given(st.integers(1, 1 << 50))
def test_written_sizes_read_back_to_the_digits_shown(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@given(st.integers(0, 1 << 70), positive)
def test_round_up_is_the_next_multiple(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple
