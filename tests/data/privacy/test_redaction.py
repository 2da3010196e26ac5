"""Private data is replaced everywhere in a row, always alike, and by nothing that is real."""

from __future__ import annotations

import gzip
import json
import re
import stat
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from soulkit.data.privacy.finders import find_private
from soulkit.data.privacy.redaction import Redaction, compiled, redact_chats
from soulkit.errors import ConfigError, DataError, MissingPackage
from tests.support.evaluation import soul

ROOT = Path(__file__).parents[3]
MAIL, PHONE, CARD = "ana.lopez@gmail.com", "+34 612 345 678", "4111 1111 1111 1111"


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def redacted(folder: Path, *rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    safe = folder / "safe.jsonl"
    redact_chats(str(written(folder, *rows)), safe, Redaction(**options))
    return [json.loads(line) for line in safe.read_text(encoding="utf-8").splitlines()]


def between(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {**fields, "messages": [{"speaker": who, "content": text} for who, text in messages]}


def test_every_string_of_a_row_is_covered_and_ids_of_tokens_go(tmp_path: Path) -> None:
    call = {"function": {"name": "mail", "arguments": json.dumps({"to": MAIL, "n": "José"})}}
    row = {
        "id": "conv-12", "person": "user_99", "note": f"from {MAIL}", "score": 3,
        "messages": [
            {"role": "user", "content": f"I am at {MAIL}", "token_ids": [1, 2]},
            {"role": "assistant", "content": [{"type": "text", "text": PHONE}], "token_ids": [3],
             "tool_calls": [call]},
            {"role": "tool", "name": "mail", "content": f'{{"sent": "{MAIL}"}}'},
            {"role": "assistant", "content": "done", "token_ids": [4]},
        ],
    }  # fmt: skip
    [safe] = redacted(tmp_path, row)
    text = json.dumps(safe, ensure_ascii=False)
    assert not any(one in text for one in (MAIL, PHONE, "conv-12", "user_99", "lopez"))
    made = re.findall(r"[\w.]+@example\.(?:org|net)", text)
    assert len(made) == 4 and len(set(made)) == 1, "one original, one pseudonym"
    user, reply, tool, last = safe["messages"]
    assert "token_ids" not in user and "token_ids" not in reply and last["token_ids"] == [4]
    assert (tool["role"], tool["name"], safe["score"]) == ("tool", "mail", 3)
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"])["n"] == "José"
    assert re.fullmatch(r"\+34 \d{3} \d{3} \d{3}", reply["content"][0]["text"])


def test_speakers_are_replaced_where_they_stand_as_words(tmp_path: Path) -> None:
    row = between(
        ("Ana López", "hey, will you call Will? annual report"),
        ("Will", "ANA! sí, López. Ana_x"),
        ("田中", "田中です"),
        ("user", "the user said hi"),
        ("Ana López", "x"),
    )
    [safe] = redacted(tmp_path, row)
    ana, will, tanaka, user, again = safe["messages"]
    first, last = ana["speaker"].split()
    assert again["speaker"] == ana["speaker"] != "Ana López"
    assert ana["content"] == f"hey, will you call {will['speaker']}? annual report"
    assert will["content"] == f"{first.upper()}! sí, {last}. Ana_x"
    assert tanaka["content"] == f"{tanaka['speaker']}です" and len(tanaka["speaker"]) == 2
    assert (user["speaker"], user["content"]) == ("user", "the user said hi")


def test_thousands_of_speakers_take_seconds(tmp_path: Path) -> None:
    names = ["n" + "".join(letters) for letters in product("abcdefghij", repeat=4)]
    start = time.process_time()
    [safe] = redacted(tmp_path, between(*((name, f"{name} and {name}s") for name in names)))
    assert time.process_time() - start < 60  # 3 s; an alternation of all names takes minutes
    last = safe["messages"][-1]
    assert last["content"] == f"{last['speaker'].lower()} and {names[-1]}s"


@pytest.mark.parametrize(
    ("name", "text"),
    [("İbrahim", "ibrahim, IBRAHIM"), ("Yıldız", "YILDIZ!"), ("Işık", "IŞIK, ışık"),
     ("Weiß", "WEISS"), ("小明A", "小明Ab"), ("李Ann", "我见李Anna了"), ("安나", "安나는"),
     ("O'Brien", "o'brien's"), ("Anna Maria", "ANNA MARIA?"), ("🙂bob", "🙂bobby")],
)  # fmt: skip
def test_spellings_of_a_name(tmp_path: Path, name: str, text: str) -> None:
    [safe] = redacted(tmp_path, between((name, text), (name, "x")))
    left = safe["messages"][0]["content"].casefold()
    assert not any(part.casefold() in left for part in (name, *text.split()) if len(part) > 2)


@pytest.mark.parametrize(
    "text",
    ["+٤٤ ٢٠ ٧٩٤٦ ٠٩٥٨", "+４４ ２０ ７９４６ ０９５８", '{"a": "\\ud800 ' + MAIL + '"}'],
)
def test_other_digits_and_half_surrogates_stop_no_file(tmp_path: Path, text: str) -> None:
    [safe] = redacted(tmp_path, between(("A1", text)))
    made = safe["messages"][0]["content"]
    assert made != text and made[:3] == text[:3] and find_private(made) == []


def test_a_person_keeps_the_pseudonym_and_no_original_is_one(tmp_path: Path) -> None:
    names = [f"u{n}" for n in range(10)]
    rows = [between(("a" + n, MAIL), person=n, id=f"c{n}") for n in names * 2]
    safe = redacted(tmp_path, *rows)
    people = [row["person"] for row in safe]
    assert people[:10] == people[10:] and len(set(people)) == 10
    assert not set(people) & set(names)
    assert people != [row["person"] for row in _again(tmp_path, rows)], "the key is random"


def _again(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "safe.jsonl").unlink()
    return redacted(folder, *rows)


ITEMS = [
    MAIL, PHONE, CARD, "612345678", "(212) 555-7890", "es91 2100 0418 4502 0005 1332",
    "192.168.1.10", "2a02:8108:1::7", "00:1A:2B:3C:4D:5E", "https://a.b/c?token=1", "12345678Z",
    "RSSMRA85T10A562S", "523-45-6789", "my password is hunter2x9", "s" + "k-proj-Ab12Cd34Ef56Gh78",
]  # fmt: skip


@pytest.mark.parametrize("item", ITEMS)
def test_what_is_written_has_the_form_and_is_never_found_again(tmp_path: Path, item: str) -> None:
    [safe] = redacted(tmp_path, between(("A1", item)))
    made = safe["messages"][0]["content"]
    assert made != item and find_private(made) == []
    if item[0] in "+(0123456789" and "." not in item and item.count(":") == 0:
        assert re.sub(r"\d", "0", made) == re.sub(r"\d", "0", item) or item.isalnum()


def test_own_patterns_and_their_errors(tmp_path: Path) -> None:
    patterns = compiled(["customer=KD-[0-9]{6}"])
    [safe] = redacted(tmp_path, between(("A1", "I am KD-123456")), patterns=patterns)
    assert re.fullmatch(r"I am [A-Z]{2}-\d{6}", safe["messages"][0]["content"])
    for wrong in ("KD", "=a", "x=(", "x=a*", "x=a{99999999999999999999}", "x=" + "(" * 5000):
        with pytest.raises(ConfigError, match="cannot be used"):
            compiled([wrong])


def test_the_sheet_is_corrected_and_applied(tmp_path: Path) -> None:
    path = written(tmp_path, between(("Ana", f"{MAIL}, ask Bob at Foo Corp"), ("Bo", PHONE)))
    sheet, safe = tmp_path / "sheet.csv", tmp_path / "safe.jsonl"
    assert not redact_chats(str(path), safe, Redaction(), review=sheet)
    assert not safe.exists() and stat.S_IMODE(sheet.stat().st_mode) == 0o600
    text = sheet.read_text(encoding="utf-8")
    assert MAIL in text and "ask Bob" in text
    corrected = text.replace(f"replace,phone,{PHONE}", f"keep,phone,{PHONE}")
    sheet.write_text(corrected + "replace,place,Foo Corp,,\n", encoding="utf-8")
    assert redact_chats(str(path), safe, Redaction(), review=sheet)
    result = safe.read_text(encoding="utf-8")
    assert PHONE in result and not any(one in result for one in (MAIL, "Foo", "Ana"))
    long = "n" * 200_000
    sheet.write_text(f"{text}replace,name,{long},,\n".replace("\n", "\r"), encoding="utf-8")
    assert redact_chats(str(path), tmp_path / "mac.jsonl", Redaction(), review=sheet)
    sheet.write_text(text.replace("replace,", "perhaps,"), encoding="utf-8")
    with pytest.raises(DataError, match="perhaps"):
        redact_chats(str(path), tmp_path / "other.jsonl", Redaction(), review=sheet)


def test_the_command_reports_and_writes_the_map_only_if_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, safe, key = (
        written(tmp_path, between(("Ana", MAIL))),
        tmp_path / "s.jsonl",
        tmp_path / "m",
    )
    assert soul("data", "redact", path, "-o", safe, "--map", key, "--json") == 0
    output, errors = capfd.readouterr()
    report = json.loads(output)
    assert report["private"] == {"name": 1, "email": 1} and report["changed"] == 1
    assert MAIL not in output + errors
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and MAIL in key.read_text()
    [(speaker, count)] = report["speakers"].items()
    assert count == 1 and f'"speaker": "{speaker}"' in safe.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chats.jsonl", "m", "s.jsonl"]
    for taken in (path, key, tmp_path / "t.jsonl"):
        before = taken.read_bytes() if taken.exists() else None
        assert soul("data", "redact", path, "-o", tmp_path / "t.jsonl", "--map", taken) == 2
        assert (taken.read_bytes() if taken.exists() else None) == before


def test_a_missing_package_or_model_is_named(tmp_path: Path) -> None:
    with pytest.raises((MissingPackage, DataError), match=r"spacy|no_such_model"):
        redacted(tmp_path, between(("Ana", "x 1")), model="no_such_model")


@pytest.fixture(scope="module")
def made_set() -> ModuleType:
    spec = spec_from_file_location("redaction_benchmark", ROOT / "benchmarks" / "redaction.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_patterns_find_98_percent_and_no_lure(made_set: ModuleType, tmp_path: Path) -> None:
    rows = list(made_set.make(100, seed=3))
    table = made_set.measured(rows)
    recalls = {kind: counts["found"] / counts["items"] for kind, counts in table.items()}
    assert recalls.pop("lure") == 0
    assert {kind: recall for kind, recall in recalls.items() if recall < 0.98} == {}
    assert made_set.left_in(rows, tmp_path) == 0


@pytest.mark.slow
@pytest.mark.torch
def test_nothing_private_is_left_in_any_byte_of_a_run(
    made_set: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = list(made_set.make(100, seed=5))
    assert made_set.left_in(rows, tmp_path) == 0
    safe = tmp_path / "safe.jsonl"
    side = json.loads(safe.read_text().splitlines()[0])["messages"][0]["speaker"]
    out = tmp_path / "run"
    done = soul("train", "sft", "--model", "tiny", "--full", "--data", safe, "--side", side,
                "--steps", 2, "--batch", 2, "--out", out)  # fmt: skip
    texts = "".join(capfd.readouterr())
    assert done == 0, texts
    assert "soul data redact" not in texts, "a redacted file gives no warning"
    secrets = {i.text for _, items in rows for i in items if i.kind not in ("lure", "name")}
    files = [p.read_bytes() for p in out.rglob("*") if p.is_file()]
    assert len(files) > 10
    files = [gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data for data in files]
    for data in (*files, safe.read_bytes(), texts.encode()):
        left = [
            one for one in secrets if one.encode() in data or json.dumps(one)[1:-1].encode() in data
        ]
        assert left == []
