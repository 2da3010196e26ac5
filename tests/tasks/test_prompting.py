"""Templates: whose is used, what their hash is of, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.errors import ConfigError
from soulkit.tasks.prompting import PromptFolder


def folder(tmp_path: Path, **files: str) -> PromptFolder:
    for name, text in files.items():
        path = tmp_path / "prompts" / "mine" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return PromptFolder("mine", tmp_path)


def test_a_template_is_plain_text(tmp_path: Path) -> None:
    prompts = folder(tmp_path, user="{% if a %}\nA: {{ a }}\n{% endif %}\nB: {{ b }} <é>\n")
    assert prompts.render("user", a=None, b="x & y") == "B: x & y <é>"
    assert prompts.render("user", a="{{ b }}", b="") == "A: {{ b }}\nB:  <é>"


def test_values_are_not_templates(tmp_path: Path) -> None:
    assert folder(tmp_path, user="{{ a }}").render("user", a="{{ 7 * 7 }}") == "{{ 7 * 7 }}"


@pytest.mark.parametrize(
    ("text", "says"),
    [("{{ secret }}", "may not see"), ("{% if %}", "no valid template"), ("{{ a", "line 1")],
)
def test_a_wrong_template(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        folder(tmp_path, user=text).render("user", a=1)
    assert says in " ".join(caught.value.lines())


def test_a_missing_template_says_where_to_write_it(tmp_path: Path) -> None:
    for ask in (lambda p: p.render("user"), lambda p: p.hashes("user")):
        with pytest.raises(ConfigError) as caught:
            ask(folder(tmp_path, coach="x"))
        assert "prompts/mine/user.md" in caught.value.way_out


def test_own_files_come_before_shared_ones(tmp_path: Path) -> None:
    assert "coach" in folder(tmp_path).hashes("coach"), "the shared coach serves every task"
    shared = folder(tmp_path).hashes("coach")
    prompts = folder(tmp_path, coach="Be kind.")
    assert prompts.render("coach") == "Be kind." and prompts.hashes("coach") != shared


def test_the_hash_follows_the_text(tmp_path: Path) -> None:
    first = folder(tmp_path, user="one").hashes("user")
    assert first == folder(tmp_path, user="one").hashes("user") and len(first["user"]) == 12
    assert first != folder(tmp_path, user="two").hashes("user")
