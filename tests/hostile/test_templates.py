"""Odd chat templates of models, and odd prompts of tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from tests.support.hostile import Attack, mutations, seeds
from tests.support.model_folders import build_model, put_copy, replaced

Attacks = Callable[[Attack, Iterable[Attack]], None]

BOMBS = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "{{ 'x' * 10**10 }}", "{{ 10**10**8 }}", "{{ 'x'|center(10**10) }}", "{{ [0] * 10**10 }}",
    "{{ '%0999999999d' % 7 }}", "{{ lipsum(n=10**7) }}", "{{ (1, 2) * 10**9 }}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(400) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x = [] %}{{ x.append(x) }}{{ x|tojson }}", "{{ 'a' * 99 ~ ('b' * 10**9)|length }}",
    "{% for i in range(50000) recursive %}{{ loop(range(50000)) }}{% endfor %}",
    "{% autoescape 'x' * 10**10 %}{% endautoescape %}",
    "{% if false %}{{ 'x' * 10**10 }}{% endif %}",
)  # fmt: skip
RUDE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    "{{ namespace.__init__.__globals__ }}", "{{ joiner.__init__.__globals__['__builtins__'] }}",
    "{% include '/etc/passwd' %}", "{% include '../../../../etc/passwd' %}", "{% import 'os' %}",
    "{% extends 'user.md' %}", "{% include 'x.md' %}", "{% include ['a', 'b'] %}",
    "{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ none.x }}", "{{ [][7] }}", "{{ {}.x.y }}", "{{ x( }}",
    "{% if %}", "{% for %}", "{% raw %}", "{# ", "{{", "}}", "{% endfor %}", "{% do x %}",
    "{% break %}", "{{ 'x'|nope }}", "{% if x is nope %}{% endif %}", "{{ nope() }}", "\x1b[31m",
    "{{ '\\x1b[2J' }}", "\x00", "{{ '\\x00' }}", "\ud800", "{{ '\\ud800' }}", "", " ",
    "{{ raise_exception('\\x1b[31m') }}", "{{ strftime_now('%' * 9999) }}",
    "{{ 7|tojson(indent=9**9) }}",
    "{{ messages }}", "{{ messages[10**6] }}", "{{ messages.clear() }}", "{{ messages.append(1) }}",
    "{{ messages|map(attribute='content')|map('nope')|list }}", "{{ 'x'.format_map }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(lipsum) }}",
    "{% set messages = 7 %}{{ messages.x }}",
    "{{ ('(' * 400) }}", "(" * 3000, "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ 1" + " + 1" * 5000 + " }}", "{% if 1 %}" * 200, "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "x" * 2_000_000, "{{ 'a'|replace('', 'b' * 99999)|replace('b', 'c' * 99999) }}",
)  # fmt: skip
TEMPLATE = b"""\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
PROMPT = b"""\
{% for word in clue.split() %}{{ loop.index }} {{ word }} {% endfor %}
{% if clue %}What is it? {{ clue }}{% else %}{{ clue | upper }}{% endif %}
"""
EVAL = ("eval", "local", "--model", "model", "--task", "cast_of_people", "--data", "synth:1",
        "--max-tokens", "2", "--max-unscored", "1", "--out", "run")  # fmt: skip
CHECK = ("tasks", "check", "riddle", "--tasks", "tasks.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("hostile") / "model")


def _attack_templates(model: Path, attack_all: Attacks, templates: Iterable[bytes]) -> None:
    def put(template: bytes, folder: Path) -> None:
        put_copy(model, folder / "model", replaced("chat_template.jinja", template))

    attack_all(
        Attack("undamaged", EVAL, partial(put, TEMPLATE)),
        (Attack(repr(text[:40]), EVAL, partial(put, text), canaries=("canary",))
         for text in templates),
    )  # fmt: skip


@pytest.mark.parametrize("part", seeds(10, quick=0))
def test_bombs_and_escapes_in_a_chat_template(model: Path, attack_all: Attacks, part: int) -> None:
    texts = [text.encode("utf-8", "surrogatepass") for text in (*BOMBS, *RUDE)]
    _attack_templates(model, attack_all, texts[part::10])


@pytest.mark.parametrize("seed", seeds(3, quick=0))
def test_damaged_chat_templates(model: Path, attack_all: Attacks, seed: int) -> None:
    _attack_templates(model, attack_all, (text for _, text in mutations(seed, TEMPLATE, 12)))


def _attack_prompts(attack_all: Attacks, prompts: Iterable[bytes]) -> None:
    def put(prompt: bytes, folder: Path) -> None:
        (folder / "prompts").mkdir()
        (folder / "prompts" / "riddle.md").write_bytes(prompt)
        rows = [{"clue": f"{n} legs", "answer": str(n)} for n in range(3)]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "tasks.yaml").write_text(
            "tasks:\n  riddle:\n    kind: text\n    rows: rows.jsonl\n"
            "    prompt: prompts/riddle.md\n    gold: answer\n    scorer: exact\n"
        )

    attack_all(
        Attack("undamaged", CHECK, partial(put, PROMPT)),
        (Attack(repr(text[:40]), CHECK, partial(put, text), canaries=("canary",))
         for text in prompts),
    )  # fmt: skip


@pytest.mark.parametrize("part", seeds(12))
def test_bombs_and_escapes_in_a_prompt(attack_all: Attacks, part: int) -> None:
    texts = [
        (f"{{{{ clue }}}} {text}").encode("utf-8", "surrogatepass") for text in (*BOMBS, *RUDE)
    ]
    _attack_prompts(attack_all, texts[part : None if part else 36 : 12])


@pytest.mark.parametrize("seed", seeds(4, quick=0))
def test_damaged_prompts(attack_all: Attacks, seed: int) -> None:
    _attack_prompts(attack_all, (text for _, text in mutations(seed, PROMPT, 15)))
