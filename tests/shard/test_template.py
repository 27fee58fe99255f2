from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kafila.errors import ModelError
from kafila.shard import template
from kafila.shard.template import ChatTemplate


def clock() -> datetime:
    return datetime(2031, 7, 26, tzinfo=UTC)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "the template of x", clock).render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if x %}\n  {% for i in x %}\n{{ i }},\n  {% endfor %}\n{% endif %}", "1,\n2,\n"),
        ("{% for i in x %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in x if i > 1 %}{{ loop.index }}:{{ i }}{% else %}none{% endfor %}", "1:2"),
        ("{% for i in x if i > 5 %}{{ i }}{% else %}none{% endfor %}", "none"),
        ("{% for i in x recursive %}{{ i }}{% if i is not number %}({{ loop(i) }}){% endif %}{% endfor %}", "12"),
        ("{% macro twice(y) %}{{ y }}{{ y }}{% endmacro %}{{ twice('é') }}", "éé"),
        ("{% set n = namespace(a=0) %}{% for i in x %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "3"),
        ("{% generation %}{{ x[0] }}{% endgeneration %}!", "1!"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2031"),
        ("{{ absent }}{{ x | length }}", "2"),
        ("{{ step }}{{ environment }}", ""),
    ],
)
def test_the_language(source: str, text: str) -> None:
    assert render(source, x=[1, 2]) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{{ raise_exception('roles must\n alternate') }}",
            "the template of x refuses this conversation: roles must alternate",
        ),
        ("{{ x.y.z }}", "fails on this conversation: 'dict object' has no attribute 'y'"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ [][3].x }}", "fails"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ x.update({'a': 1}) }}", "not safely callable|unsafe"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "recursion"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% include 'other' %}", "fails"),
        ("{{ 'x' * 10 ** 11 }}", r"\* would be too large"),
        ("{{ 10 ** 6 * [0, 1] * 9 }}", r"\* would be too large"),
        ("{{ 9 ** (9 ** 9) }}", r"\*\* would be too large"),
    ],
)
def test_a_template_that_errs_is_named(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        render(source, x={})
    assert str(caught.value).startswith("the template of x ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% macro fork(n) %}{% if n %}{{ fork(n - 1) }}{{ fork(n - 1) }}{% endif %}{% endmacro %}{{ fork(100) }}",
        "{% set step = 1 %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_loops_is_stopped(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template, "MAX_STEPS", 10_000)
    with pytest.raises(ModelError, match="10,000 steps"):
        render(source)


def test_ordinary_products_are_python_s() -> None:
    assert render("{{ '-' * 3 }}{{ 6 * 7 }} {{ 2 ** 10 }} {{ 1.5 * 2 }} {{ ([0] * 2) | length }}") == "---42 1024 3.0 2"


def test_each_rendering_has_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_STEPS", 10)
    compiled = ChatTemplate("{% for i in range(10) %}.{% endfor %}", "t", clock)
    assert [compiled.render({}) for _ in range(3)] == ["." * 10] * 3


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% unknown %}", "{{ x | no_such_filter }}", "(" * 3 + "{{" + "(" * 5000]
)
def test_what_is_no_template_is_refused_when_loaded(source: str) -> None:
    with pytest.raises(ModelError, match="the template of x is not a chat template"):
        ChatTemplate(source, "the template of x", clock)
