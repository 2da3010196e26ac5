"""Templates: whose is used, what their hash is of, and what a wrong one says.

Word budgets of lists, and the fullest lesson that is safe to give.

Tables of texts: found beside the module, read late, and never changed by a reader.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import ConfigError
from soulkit.tasks.kit.prompting import (
    NAME,
    PromptFolder,
    Texts,
    fair_cap,
    first_words,
    keep_latest,
    last_words,
    read_texts,
    share_fairly,
    total_words,
)
from soulkit.tasks.kit.user_code import BUILTIN


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
    [("{{ secret }}", "may not see"), ("{% if %}", "not a valid template"), ("{{ a", "line 1")],
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
    shared_files = [prompts.is_shared(name) for name in ("coach", "pairwise", "none")]
    assert shared_files == [False, True, False]
    assert prompts.sizes("co", "pair") == {"coach": 2}
    assert prompts.unopened(tmp_path) == []
    assert folder(tmp_path, judge="Who?").unopened(tmp_path) == ["mine/coach.md", "mine/judge.md"]


def test_the_hash_follows_the_text(tmp_path: Path) -> None:
    first = folder(tmp_path, user="one").hashes("user")
    assert first == folder(tmp_path, user="one").hashes("user") and len(first["user"]) == 12
    assert first != folder(tmp_path, user="two").hashes("user")


LENGTHS = st.lists(st.integers(0, 60), max_size=12)


@given(LENGTHS, st.integers(0, 400))
def test_a_fair_cap_fits_and_a_larger_one_does_not(lengths: list[int], budget: int) -> None:
    cap = fair_cap(lengths, budget)
    assert sum(min(n, cap) for n in lengths) <= budget or not lengths
    if any(n > cap for n in lengths):
        assert sum(min(n, cap + 1) for n in lengths) > budget


@given(LENGTHS, st.integers(1, 400))
def test_shared_budgets_are_kept_and_cuts_add_up(lengths: list[int], budget: int) -> None:
    items = [{"text": " ".join(["w"] * n)} for n in lengths]
    fitted, cut = share_fairly(items, budget)
    words_left = sum(
        min(n, item["text"].split().count("w")) for n, item in zip(lengths, fitted, strict=True)
    )
    assert words_left <= budget and words_left + cut == sum(lengths) and len(fitted) == len(items)
    assert (cut == 0) == (list(fitted) == items)


@given(LENGTHS, st.integers(1, 400))
def test_the_latest_entries_stay(lengths: list[int], budget: int) -> None:
    entries = [" ".join([f"w{i}"] * n) for i, n in enumerate(lengths)]
    latest, cut = keep_latest(entries, budget)
    assert total_words(latest) - sum(text.endswith(" [...]") for text in latest) <= budget
    if cut and not latest[-1].endswith(" [...]"):
        assert list(latest) == entries[len(entries) - len(latest) :]
        assert total_words(latest) + cut == total_words(entries)


def test_line_breaks_survive_a_cut() -> None:
    assert first_words("a\nb  c", 2) == "a\nb [...]"
    assert first_words("a\nb", 2) == "a\nb"
    assert last_words("a\nb  c", 2) == "[...] b  c"
    assert last_words("a b", 2) == "a b" and last_words("a b", 0) == first_words("a", 0) == "[...]"
    assert keep_latest(["a b c", "d"], None) == (("a b c", "d"), 0)
    assert keep_latest(["a", "b c d"], 2) == (("b c [...]",), 2)


TABLES = "towns: [Tarn, Gelm]\nways:\n  kind: [[a, b]]\n"


def texts(folder: Path, content: str | None) -> Texts:
    if content is not None:
        (folder / NAME).write_text(content, encoding="utf-8")
    return Texts(str(folder / "rows.py"))


def test_lists_are_tuples(tmp_path: Path) -> None:
    tables = texts(tmp_path, TABLES)
    assert tables["towns"] == ("Tarn", "Gelm") and tables["ways"] == {"kind": (("a", "b"),)}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- a\n", "is not a mapping of text tables"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        texts(tmp_path, content)["towns"]
    assert str(tmp_path / NAME) in str(caught.value)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table 'town'"):
        texts(tmp_path, TABLES)["town"]


def test_every_file_of_the_package_can_be_read() -> None:
    folders = [path.parent for path in BUILTIN.rglob(NAME)]
    assert folders and all(all(read_texts(folder).values()) for folder in folders)


def test_nothing_is_read_before_it_is_needed() -> None:
    modules = [
        ".".join(("soulkit.tasks", *path.relative_to(BUILTIN).parent.parts, path.stem))
        for folder in {path.parent for path in BUILTIN.rglob(NAME)}
        for path in folder.glob("*.py")
        if path.stem != "__init__"
    ]
    code = (
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from soulkit.tasks.kit.prompting import read_texts\n"
        "raise SystemExit(read_texts.cache_info().misses)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
