"""Session codes survive people: what they forgive, what they catch, what they say."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import InvitationError, UsageError
from kafila.ring.invite import ALPHABET, HostPort, SessionCode, check_character, parse_code, parse_host_port

codes = st.builds(
    SessionCode,
    st.text(ALPHABET, min_size=5, max_size=5),
    st.text(ALPHABET, min_size=15, max_size=15),
    st.sampled_from(
        [None, HostPort("203.0.113.5", 7443), HostPort("2001:db8::1", 1), HostPort("kafila.example", 65535)]
    ),
)
CODE = SessionCode("AB3DE", "0123456789ABCDE")


@given(codes)
def test_a_code_reads_back_as_it_was_printed(code: SessionCode) -> None:
    assert parse_code(str(code)) == code


def test_the_printed_form_is_groups_of_five_and_four() -> None:
    assert [len(group) for group in str(CODE).split("-")] == [5, 4, 4, 4, 4]
    assert str(CODE).startswith("AB3DE-0123-4567-89AB-CDE")


def test_repr_keeps_the_secret() -> None:
    assert CODE.secret not in repr(CODE)


def test_new_codes_use_the_whole_alphabet_and_do_not_repeat() -> None:
    made = [SessionCode.new(random.Random(seed).randbytes) for seed in range(200)]
    assert len({code.secret for code in made}) == 200
    assert set("".join(code.locator + code.secret for code in made)) == set(ALPHABET)
    assert SessionCode.new(os.urandom) != SessionCode.new(os.urandom)


@given(st.text(ALPHABET, min_size=20, max_size=20))
def test_every_substitution_is_caught(characters: str) -> None:
    whole = characters + check_character(characters)
    for position, right in enumerate(whole):
        for wrong in ALPHABET.replace(right, ""):
            with pytest.raises(InvitationError, match="mistyped"):
                parse_code(whole[:position] + wrong + whole[position + 1 :])


@given(st.text(ALPHABET, min_size=20, max_size=20))
def test_every_exchange_of_two_characters_is_caught(characters: str) -> None:
    whole = characters + check_character(characters)
    for first, second in combinations(range(21), 2):
        if whole[first] == whole[second]:
            continue
        swapped = list(whole)
        swapped[first], swapped[second] = whole[second], whole[first]
        with pytest.raises(InvitationError, match="mistyped"):
            parse_code("".join(swapped))


def test_every_pair_of_values_exchanged_at_every_neighbouring_place_is_caught() -> None:
    # The check is linear, so what one exchange changes does not depend on the other characters: this is exhaustive.
    for place in range(20):
        for a, b in combinations(ALPHABET, 2):
            whole = "0" * place + a + b + "0" * (19 - place)
            swapped = "0" * place + b + a + "0" * (19 - place)
            if place == 19:  # the second of the two is the check character itself
                assert not (check_character(whole[:20]) == b and check_character(swapped[:20]) == a)
            else:
                assert check_character(whole[:20]) != check_character(swapped[:20])


@pytest.mark.parametrize(
    "mangle",
    [
        str.lower,
        lambda text: text.replace("-", ""),
        lambda text: text.replace("-", " "),
        lambda text: text.replace("-", " - "),
        lambda text: text.replace("-", "\N{EN DASH}"),
        lambda text: text.replace("-", "\N{NON-BREAKING HYPHEN}"),
        lambda text: text.replace("-", "\N{MINUS SIGN}"),
        lambda text: text.replace("0", "O"),
        lambda text: text.replace("0", "o").replace("1", "l"),
        lambda text: text.replace("1", "I"),
        lambda text: text.replace("1", "i"),
        lambda text: f"  {text}\n",
        lambda text: f'"{text}"',
        lambda text: f"'{text}',",
        lambda text: f"\N{LEFT DOUBLE QUOTATION MARK}{text}\N{RIGHT DOUBLE QUOTATION MARK}.",
        lambda text: f"<{text}>",
        lambda text: f"\N{ZERO WIDTH NO-BREAK SPACE}{text}",
        lambda text: "-".join(text.replace("-", "")),
        lambda text: text.translate({ord(c): ord(c) + 0xFEE0 for c in ALPHABET}),  # full-width forms
    ],
)
def test_what_people_do_to_a_code_is_forgiven(mangle: object) -> None:
    assert callable(mangle)
    assert parse_code(mangle(str(CODE))) == CODE


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("@203.0.113.5:7443", HostPort("203.0.113.5", 7443)),
        (" @ Kafila.Example:1 ", HostPort("kafila.example", 1)),
        ("@[2001:DB8::0:1]:7443'", HostPort("2001:db8::1", 7443)),
        ("@my-host:9", HostPort("my-host", 9)),
    ],
)
def test_the_rendezvous_follows_the_at_sign(tail: str, expected: HostPort) -> None:
    assert parse_code(str(CODE) + tail).rendezvous == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "too short: 0 characters where 21"),
        (str(CODE)[:-1], "too short: 20 characters where 21"),
        (str(CODE) + "A", "too long: 22 characters where 21"),
        (str(CODE).replace("A", "U", 1), "'U' cannot appear"),
        (str(CODE).replace("A", "!", 1), "'!' cannot appear"),
        (str(CODE).replace("3", "4", 1), "mistyped"),
        (str(CODE) + "@", "after the @ is wrong: '' names no port"),
        (str(CODE) + "@host", "write it as host:7443"),
        (str(CODE) + "@host:0", "from 1 to 65535"),
        (str(CODE) + "@host:65536", "from 1 to 65535"),
        (str(CODE) + "@host:000001", "from 1 to 65535"),
        (str(CODE) + "@host:" + "9" * 5000, "of that length"),
        (str(CODE) + "@2001:db8::1:7443", "needs brackets"),
        (str(CODE) + "@[2001:db8::1]", "looks like"),
        (str(CODE) + "@[fe80::1%eth0]:7443", "zones"),
        (str(CODE) + "@[203.0.113.5]:7443", "not an IPv6 address"),
        (str(CODE) + "@ho!st:7443", "neither a host name"),
    ],
)
def test_errors_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvitationError) as caught:
        parse_code(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text())
def test_any_text_is_a_code_or_one_clear_error(text: str) -> None:
    with suppress(InvitationError):
        parse_code(text)


@given(st.text())
def test_any_text_is_an_address_or_one_clear_error(text: str) -> None:
    try:
        address = parse_host_port(text)
    except UsageError:
        return
    assert parse_host_port(str(address)) == address
