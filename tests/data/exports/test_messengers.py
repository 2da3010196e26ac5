"""Exports of Slack, Discord, Telegram and WhatsApp, in the form that the products write."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.exports.layouts import ReadOptions
from soulkit.data.exports.reading import recognise
from soulkit.data.files import BadRow
from tests.support.chats import lesson, lines

Row = dict[str, Any]


def imported(path: Path, layout: str) -> list[Row]:
    """The conversations of an export, which must be recognised as `layout`."""
    export = recognise(path)
    assert [one.name.split()[0] for one in export.parts] == [layout]
    rows = list(export.rows(ReadOptions()))
    assert not [row for row in rows if isinstance(row, BadRow)]
    return rows  # type: ignore[return-value]


def said(row: Row) -> list[str]:
    """Lines such as `Mia: hi [image]`."""
    return [
        " ".join([f"{m['speaker']}: {m['content']}", *(f"[{k}]" for k in m.get("attachments", ()))])
        for m in row["messages"]
    ]


# -- Slack ---------------------------------------------------------------------------------------


def slack(user: str, ts: int, text: str, **more: Any) -> Row:
    return {
        "type": "message",
        "user": user,
        "ts": f"{1704448800 + ts}.000100",
        "text": text,
        **more,
    }


SLACK: dict[str, list[Any]] = {
    "users.json": [
        {"id": "U1", "name": "mia", "profile": {"real_name": "Mia Li", "display_name": "Mia"}},
        {"id": "U2", "name": "ben", "profile": {"real_name": "Ben", "display_name": ""}},
        {"id": "U3", "name": "b2", "real_name": "Ben", "profile": {"display_name": ""}},
    ],
    "channels.json": [{"id": "C1", "name": "tea", "creator": "U1", "members": ["U1"]}],
    "tea/2024-01-05.json": [
        slack("U1", 0, "<@U1> has joined the channel", subtype="channel_join"),
        slack("U1", 1, "hi <@U2>, see <https://x.org/a?b=1|this> in <#C1|> &lt;3 <!here>"),
        slack("U2", 2, "who has tea?", thread_ts="1704448802.000100", reply_count=2),
        slack("U3", 3, "", files=[{"mimetype": "image/png", "name": "a.png"}, {"name": "b.pdf"}]),
        slack("U9", 4, "I left", user_profile={"display_name": "Zoe", "name": "zoe"}),
        {"type": "message", "subtype": "bot_message", "bot_id": "B1", "text": "x",
         "ts": "1704448805.1"},
    ],
    "tea/2024-01-06.json": [
        slack("U1", 86400, "I have", thread_ts="1704448802.000100"),
        slack("U1", 86401, "morning"),
    ],
}  # fmt: skip


def test_slack_gives_names_threads_and_days(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "slack.zip", "w") as archive:
        for name, value in SLACK.items():
            archive.writestr(f"Tea Slack export/{name}", json.dumps(value))
    rows = imported(tmp_path / "slack.zip", "Slack")
    assert [said(row) for row in rows] == [
        [
            "Mia: hi @Ben (U2), see this in #tea <3 @here",
            "Ben (U3):  [image] [file]",
            "Zoe: I left",
        ],
        ["Mia: morning"],
        ["Ben (U2): who has tea?", "Mia: I have"],
    ]
    assert rows[0]["messages"][0]["time"] == "2024-01-05T10:00:01.000100+00:00"
    assert rows[0]["id"] == imported(tmp_path / "slack.zip", "Slack")[0]["id"]


# -- Discord and Telegram ------------------------------------------------------------------------


def test_discord_chats_are_cut_by_pauses_and_bots_are_left_out(tmp_path: Path) -> None:
    def message(name: str, time: str, text: str, **more: Any) -> Row:
        author = {"id": "7", "name": name, "nickname": name.title(), "isBot": name == "bot"}
        return {"type": "Default", "timestamp": f"2023-01-{time}:00.123+00:00",
                "content": text, "author": author, "attachments": [], **more}  # fmt: skip

    picture = [{"id": "5", "url": "https://cdn/x", "fileName": "cat.jpg", "fileSizeBytes": 3}]
    value = {
        "guild": {"id": "1", "name": "G"}, "channel": {"id": "2", "name": "c"},
        "dateRange": {"after": None, "before": None},
        "messages": [
            message("mia", "15T10:30", "hi"), message("bot", "15T10:31", "beep"),
            message("ben", "15T16:00", "ho", type="Reply", attachments=picture),
            message("ben", "15T16:01", "joined", type="GuildMemberJoin"),
            message("mia", "15T22:30", "later"),
        ],
        "messageCount": 5,
    }  # fmt: skip
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(value), encoding="utf-8")
    rows = imported(tmp_path / "c.json", "Discord")
    assert [said(row) for row in rows] == [["Mia: hi", "Ben: ho [image]"], ["Mia: later"]]
    value["messages"].reverse()  # type: ignore[attr-defined]
    (tmp_path / "c.json").write_text(json.dumps(value))
    turned = imported(tmp_path / "c.json", "Discord")
    assert [said(row) for row in turned[::-1]] == [said(row) for row in rows]
    assert {row["id"] for row in turned} == {row["id"] for row in rows}


def telegram(name: str | None, at: str, text: Any, **more: Any) -> Row:
    return {
        "id": 3, "type": "message", "date": f"2024-01-05T{at}:00", "date_unixtime": "1",
        "from": name, "from_id": "user7", "text": text, "text_entities": [], **more,
    }  # fmt: skip


TELEGRAM = {
    "name": "Tea", "type": "private_group", "id": 11,
    "messages": [
        {"id": 1, "type": "service", "date": "2024-01-05T09:00:00", "actor": "Mia",
         "action": "create_group", "text": ""},
        telegram("Mia", "10:00", ["see ", {"type": "link", "text": "x.org"}, " now"]),
        telegram("Ben", "10:01", "", photo="photos/a.jpg", width=1, height=1),
        telegram("Ben", "10:02", "from the news", forwarded_from="News"),
        telegram(None, "10:03", "", media_type="voice_message", file="a"),
        telegram("دانة", "10:04", "مرحبا"),
    ],
}  # fmt: skip
TEA = [
    "Mia: see x.org now",
    "Ben:  [image]",
    "Ben: from the news",
    "user7:  [audio]",
    "دانة: مرحبا",
]


def test_telegram_is_read_as_one_chat_and_as_a_whole_account(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TELEGRAM, indent=1), encoding="utf-8")
    (row,) = imported(tmp_path / "one.json", "Telegram")
    assert said(row) == TEA and row["messages"][0]["time"] == "2024-01-05T10:00:00"
    assert row["messages"][2]["trained"] is False
    assert lines(lesson(row, "Mia"))[1] == "assistant* see x.org now"
    undated = {k: v for k, v in telegram("Ben", "10:05", "yo").items() if k != "date"}
    other = {"type": "personal_chat", "id": 12, "messages": [undated]}
    account = {
        "about": "Here is the data you requested.",
        "personal_information": {"user_id": 1, "first_name": "Mia"},
        "contacts": {"list": [{"user_id": n, "first_name": "x" * 50} for n in range(9000)]},
        "chats": {"about": "…", "list": [TELEGRAM, other]}, "left_chats": {"list": [TELEGRAM]},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(account), encoding="utf-8")
    rows = imported(tmp_path / "result.json", "Telegram")
    assert [said(row) for row in rows] == [TEA, ["Ben: yo"], TEA]
    assert [row["id"] for row in rows] == [row["id"], rows[1]["id"], f"{row['id']}-2"]


# -- WhatsApp ------------------------------------------------------------------------------------

L, R, N = "\u200e", "\u200f", "\u202f"
FORMS: dict[str, tuple[list[str], str]] = {
    "Android, US": (["1/5/24, 9:05 PM - Mia: hi", "1/13/24, 9:00 AM - Mia: x"],
                    "2024-01-05T21:05:00"),
    "Android, US, one day": (["1/5/24, 9:05 PM - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, UK, one day": (["05/01/2024, 21:05 - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, India, one day": (["5/1/24, 9:05 pm - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, UK": (["05/01/2024, 21:05 - Mia: hi", "06/01/2024, 21:05 - Ben: ho"],
                    "2024-01-05T21:05:00"),
    "Android, UK, by the days between": (
        ["05/01/2024, 9:05 pm - Mia: hi", "07/01/2024, 21:05 - Ben: ho"],
        "2024-01-05T21:05:00"),
    "Android, Germany": (["05.01.24, 21:05 - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, Sweden": (["2024-01-05 21:05 - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, Spain": (["5/1/24, 9:05 p. m. - Mia: hi", "15/1/24, 9:05 a. m. - Mia: hi"],
                       "2024-01-05T21:05:00"),
    "Android, Korea": (["2024. 1. 5. 오후 9:05 - Mia : hi"], "2024-01-05T21:05:00"),
    "Android, China": (["2024/1/5 下午9:05 - Mia: hi"], "2024-01-05T21:05:00"),
    "Android, Arabic": (
        [f"{R}٥{R}/١{R}/٢٠٢٤، ٩:٠٥ م - Mia: hi", f"{R}١٥{R}/١{R}/٢٠٢٤، ٩:٠٥ م - Mia: hi"],
        "2024-01-05T21:05:00"),
    "Android, Thailand": (["5/1/2567 21:05 - Mia: hi", "15/1/2567 21:05 - Mia: hi"],
                          "2024-01-05T21:05:00"),
    "iOS, US": ([f"[1/5/24, 9:05:07{N}PM] Mia: hi", f"[1/25/24, 9:05:07{N}PM] Mia: hi"],
                "2024-01-05T21:05:07"),
    "iOS, Germany": (["[05.01.24, 21:05:07] Mia: hi"], "2024-01-05T21:05:07"),
    "iOS, Finland": (["[5.1.2024 klo 21.05.07] Mia: hi"], "2024-01-05T21:05:07"),
    "iOS, Brazil": (["[05/01/24 21:05:07] Mia: hi", "[15/01/24 21:05:07] Mia: hi"],
                    "2024-01-05T21:05:07"),
    "iOS, midnight": (["[15/1/24, 12:05:07 AM] Mia: hi"], "2024-01-15T00:05:07"),
    "iOS, Hebrew": (['[5.1.2024, 9:05:07 אחה"צ] Mia: hi'], "2024-01-05T21:05:07"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_whatsapp_dates_of_many_countries(tmp_path: Path, form: str) -> None:
    text, time = FORMS[form]
    (tmp_path / "WhatsApp Chat with Mia.txt").write_text("\r\n".join(text), encoding="utf-8")
    rows = imported(tmp_path / "WhatsApp Chat with Mia.txt", "WhatsApp")
    assert rows[0]["messages"][0] == {"speaker": "Mia", "content": "hi", "time": time}


def test_a_line_with_an_impossible_date_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    text = "13/01/2024, 10:00 - Mia: hi\n40/40/2024, 10:00 - Ben: x\n13/01/2024, 10:01 - Ben: ho"
    (tmp_path / "a.txt").write_text(text)
    bad, row = recognise(tmp_path / "a.txt").rows(ReadOptions())
    assert isinstance(bad, BadRow) and "40/40/2024" in bad.why
    assert isinstance(row, dict) and said(row) == ["Mia: hi", "Ben: ho"]


WHATSAPP = f"""\
[05.01.24, 10:00:00] Tee: {L}Nachrichten und Anrufe sind Ende-zu-Ende-verschlüsselt.
[05.01.24, 10:00:01] Mia: Hallo: wie geht's?
- eins

- zwei
{L}[05.01.24, 10:00:02] \u202a+49 170 1234567\u202c: {L}Bild weggelassen
{L}[05.01.24, 10:00:03] ~{N}Ben: Katze {L}<Anhang: 00000003-PHOTO-2024-01-05-10-00-03.jpg>
[05.01.24, 10:00:04] Mia: {L}Diese Nachricht wurde gelöscht.
{L}[05.01.24, 10:00:05] Mia: schön {L}<Diese Nachricht wurde bearbeitet.>
[05.01.24, 10:00:06] דנה: שלום @\u2068Ben\u2069 👩\u200d🔬
[05.01.24, 17:00:00] Mia: <3"""
ANDROID = """\
05/01/2024, 10:00 - Messages and calls are end-to-end encrypted: no one outside can read them.
05/01/2024, 10:00 - Mia created group "Tea"
05/01/2024, 10:01 - Mia: <Media omitted>
05/01/2024, 10:01 - Ben: IMG-20240105-WA0001.jpg (file attached)
the cat
05/01/2024, 10:02 - Mia: You deleted this message
05/01/2024, 10:03 - Ben: <Multimedia omitido>
05/01/2024, 10:04 - Ben: <smiles>
05/01/2024, 10:05 - Mia: I omitted it"""


def test_whatsapp_messages_of_several_lines_and_notices(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "WhatsApp Chat - Tee.zip", "w") as archive:
        archive.writestr("_chat.txt", WHATSAPP)
        archive.writestr("00000003-PHOTO-2024-01-05-10-00-03.jpg", b"x")
    rows = imported(tmp_path / "WhatsApp Chat - Tee.zip", "WhatsApp")
    assert [said(row) for row in rows] == [
        ["Mia: Hallo: wie geht's?\n- eins\n\n- zwei", "+49 170 1234567:  [image]",
         "Ben: Katze [image]", "Mia: schön", "דנה: שלום @Ben 👩\u200d🔬"],
        ["Mia: <3"],
    ]  # fmt: skip
    (tmp_path / "a.txt").write_text(ANDROID, encoding="utf-8")
    (row,) = imported(tmp_path / "a.txt", "WhatsApp")
    assert said(row) == ["Mia:  [file]", "Ben: the cat [image]", "Ben:  [file]", "Ben: <smiles>",
                         "Mia: I omitted it"]  # fmt: skip
