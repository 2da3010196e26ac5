"""Reads chats between people: exports of Slack, Discord, Telegram and WhatsApp.

Every message has its speaker's name as exported and its time. Notices of the app (joins, calls,
deleted messages) and messages of bots are left out; forwarded messages are not learned. A chat is
cut into conversations: in Slack by thread, and by day outside of threads; elsewhere by pauses.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import (
    Row,
    attachment_kind,
    converted_records,
    epoch_seconds,
    has_keys,
    json_stream,
    records,
    spoken_message,
)
from soulkit.data.files import BadRow, SourcedRow

PAUSE = 6 * 3600
"""Seconds of silence that end a conversation: a night, but not a working day."""
NOTICES = "notices of apps and bots"

Convert = Callable[[Any], Row | None]


def _said(speaker: Any, text: Any, time: Any, *kinds: str, **more: Any) -> Row | None:
    message = spoken_message("speaker", speaker, text, time, kinds, **more)
    if message and "time" not in message:
        raise ValueError(f"a message has the time {time}")
    return message


def _messages(
    sourced: Iterable[SourcedRow], convert: Convert, options: ReadOptions
) -> Iterator[Row | BadRow]:
    """The messages among the entries of a chat; the others are counted."""

    def counted(entry: Any, options: ReadOptions) -> Iterator[Row]:
        message = convert(entry)
        if message is None:
            options.left_out[NOTICES] += 1
        else:
            yield message

    return converted_records(sourced, counted, options)


def _row(talk: Sequence[Row]) -> Row:
    """The id depends on the first message only, and names no one: ids are not redacted."""
    talk = talk if talk[0]["time"] <= talk[-1]["time"] else talk[::-1]  # the newest came first
    first = "\n".join(str(talk[0][key]) for key in ("time", "speaker", "content"))
    return {"id": hashlib.sha256(first.encode()).hexdigest()[:12], "messages": list(talk)}


def _cut(messages: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
    """The conversations of one chat."""
    talk: list[Row] = []
    for message in messages:
        if isinstance(message, BadRow):
            yield message
            continue
        if talk and abs(epoch_seconds(message["time"]) - epoch_seconds(talk[-1]["time"])) > PAUSE:
            yield _row(talk)
            talk = []
        talk.append(message)
    if talk:
        yield _row(talk)


# -- Slack ---------------------------------------------------------------------------------------

_SPOKEN = ("", "me_message", "thread_broadcast", "file_share")
_MARKUP = re.compile(r"<([@#!]?)([^|<>]*)(?:\|([^<>]*))?>")
_LISTS = ("users.json", "channels.json", "groups.json")


def _is_slack(file: ExportFile) -> bool:
    if PurePosixPath(file.name).name in _LISTS:
        return has_keys(file, "id", "profile") or has_keys(file, "id", "creator")
    return bool(re.match(rb'\s*\[\s*\{[^\0]*"ts":\s*"\d{10}\.\d+"', file.head))


def _slack(files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
    names: dict[str, str] = {}
    channels: dict[str, list[ExportFile]] = defaultdict(list)
    for file in files:
        place = PurePosixPath(file.name)
        if place.name in _LISTS:
            listed = [one for _, one in records(file, "item") if isinstance(one, Mapping)]
            users = {str(one.get("id")): _slack_name(one) for one in listed}
            count = Counter(users.values())  # two people may have one name
            names |= {k: name if count[name] == 1 else f"{name} ({k})" for k, name in users.items()}
        else:
            channels[str(place.parent)].append(file)
    for days in channels.values():
        threads: dict[str, list[Row]] = defaultdict(list)
        for day in sorted(days, key=lambda file: file.name):
            convert = partial(_slack_message, names=names)
            for message in _messages(records(day, "item"), convert, options):
                if isinstance(message, BadRow):
                    yield message
                else:
                    threads[message.pop("thread", "")].append(message)
            if "" in threads:
                yield _row(threads.pop(""))
        yield from map(_row, threads.values())


def _slack_name(person: Mapping[str, Any]) -> str:
    profile = person.get("profile") or person.get("user_profile") or {}
    names = (profile.get("display_name"), profile.get("real_name"), person.get("real_name"))
    return next((name for name in (*names, person.get("name"), person.get("user")) if name), "")


def _slack_message(entry: Mapping[str, Any], names: Mapping[str, str]) -> Row | None:
    if (entry.get("subtype") or "") not in _SPOKEN or "bot_id" in entry or not entry.get("user"):
        return None

    def shown(match: re.Match[str]) -> str:
        sign, target, label = match.groups()
        if sign in ("@", "#"):
            return str(sign + (names.get(target) or label or target))
        return label or ("@" if sign else "") + target

    text = html.unescape(_MARKUP.sub(shown, entry.get("text") or ""))
    kinds = [attachment_kind(f.get("mimetype") or f.get("name")) for f in entry.get("files") or []]
    speaker, thread = names.get(entry["user"]) or _slack_name(entry), entry.get("thread_ts") or ""
    alone = thread == entry["ts"] and not entry.get("reply_count")
    return _said(speaker, text, entry["ts"], *kinds, thread="" if alone else thread)


# -- Discord (DiscordChatExporter) and Telegram --------------------------------------------------


def _streamed(file: ExportFile) -> Iterator[tuple[int, Row]]:
    """(number of its chat, entry) for the entries of every list `messages`, at any depth."""
    import ijson

    chat, builder, inside = 0, None, ""
    with json_stream(file) as stream:
        for place, event, value in ijson.parse(stream, use_float=True):
            if builder is not None:
                builder.event(event, value)
                if event == "end_map" and place == inside:
                    yield chat, builder.value
                    builder = None
            elif event == "start_map" and place.endswith("messages.item"):
                builder, inside = ijson.ObjectBuilder(), place
                builder.event(event, value)
            elif event == "start_array" and place.endswith("messages"):
                chat += 1


def _chats(
    convert: Convert, files: Sequence[ExportFile], options: ReadOptions
) -> Iterator[Row | BadRow]:
    for file in files:
        for _, entries in groupby(_streamed(file), key=lambda pair: pair[0]):
            sourced = ((file.name, entry) for _, entry in entries)
            yield from _cut(_messages(sourced, convert, options))


def _discord_message(entry: Mapping[str, Any]) -> Row | None:
    author = entry["author"]
    if entry.get("type", "Default") not in ("Default", "Reply") or author.get("isBot"):
        return None
    kinds = [attachment_kind(file.get("fileName")) for file in entry.get("attachments") or []]
    speaker = author.get("nickname") or author.get("name") or author["id"]
    return _said(speaker, entry.get("content"), entry.get("timestamp"), *kinds)


_MEDIA = {"sticker": "image", "animation": "image", "voice_message": "audio",
          "audio_file": "audio", "video_file": "video", "video_message": "video"}  # fmt: skip


def _telegram_message(entry: Mapping[str, Any]) -> Row | None:
    if entry.get("type") != "message":
        return None
    text, media = entry.get("text") or "", entry.get("media_type")
    parts = [text] if isinstance(text, str) else text
    words = "".join(part if isinstance(part, str) else part["text"] for part in parts)
    kinds = ["image"] if "photo" in entry else []
    if media or "file" in entry:
        kinds.append(_MEDIA.get(media or "") or attachment_kind(entry.get("mime_type")))
    others = {"trained": False} if "forwarded_from" in entry or "via_bot" in entry else {}
    speaker = entry.get("from") or entry["from_id"]  # a deleted account has no name
    time = entry.get("date") or entry.get("date_unixtime")
    return _said(speaker, words, time, *kinds, **others)


# -- WhatsApp ------------------------------------------------------------------------------------

_MARK = "[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
_NOTICE = ("\u200e", "\u200f")
_TO = rf"{_MARK}*[./-]\s?{_MARK}*"
_HEAD = re.compile(
    rf"{_MARK}*\[?(\d{{1,4}}){_TO}(\d{{1,2}}){_TO}(\d{{1,4}})([^\d\[\]]{{1,20}}?)(\d\d?)[:.](\d\d)"
    r"(?:[:.](\d\d))?([^\d:\[\]–-]{0,16}?)(?:\]|\s[-–])\s?(.*)"
)
"""Three parts of the date, words, hour, minute, second, words, and the rest of the line."""
_SPEAKER = re.compile(rf"(.{{1,80}}?)\s?{_MARK}*:(?:\s|$)(.*)")
_AFTERNOON = r"p\.?\s?m|م|오후|下午|午後|晚上|中午|אחה|अपराह्न"
_FORENOON = r"a\.?\s?m|ص|오전|上午|午前|早上|凌晨|לפנה|पूर्वाह्न"
_OMITTED = r"omit|ausgeschlossen|weggelassen|\bomis|omess|absent|ocult|^null$"
"""A picture or file that was not exported: English, German, Spanish, French, Italian, Portuguese;
so are the words for attached files and deleted messages."""
_KINDS = {"image": r"im+a[gi]|bild|foto|photo|sti[ck]|gif", "video": r"v[ií]d[eé]",
          "audio": r"[aá]udio"}  # fmt: skip
_ATTACHED = (
    r"<[^<>:\n]+:\s?([^<>\n]+\.\w{2,5})>|^([^\n]+\.\w{2,5}) \((?:file attached|"
    r"Datei angehängt|archivo adjunto|fichier joint|file allegato|arquivo anexado)\)"
)
_DELETED = (
    r"(this message was deleted|you deleted this message|diese nachricht wurde gelöscht|"
    r"du hast diese nachricht gelöscht|se eliminó este mensaje|eliminaste este mensaje|"
    r"ce message a été supprimé|vous avez supprimé ce message|questo messaggio è stato eliminato|"
    r"hai eliminato questo messaggio|(esta )?mensagem (foi )?apagada|você apagou esta mensagem)"
    r"[ .]*"
)
_AMERICAN = re.compile(rb"\W*[1-9]\d?/[1-9]\d?/\d\d,[^\n]{5,12}[AP]M")
_EDITED = r"\s*(?:\u200e<[^<>\n:]*>|<This message was edited>)$"


def _is_whatsapp(file: ExportFile) -> bool:
    lines = file.head.decode("utf-8-sig", "ignore").splitlines()[:100]
    heads = [_HEAD.match(line) for line in lines]
    named = any(_SPEAKER.match(head[9]) for head in heads if head)
    return file.name.lower().endswith(".txt") and named and heads[0] is not None


_Entry = tuple[re.Match[str], str, list[str]]


def _entries(file: ExportFile) -> list[_Entry]:
    """(first line, speaker, lines of text) of every message; the speaker of a notice is empty."""
    entries: list[_Entry] = []
    with file.opener() as stream:
        for raw in io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="\n"):
            line = raw.rstrip("\r\n")
            if head := _HEAD.match(line):
                speaker = _SPEAKER.match(head[9])
                entries.append(
                    (head, speaker[1] if speaker else "", [speaker[2] if speaker else ""])
                )
            elif entries:
                entries[-1][2].append(line)
    return entries


def _whatsapp(files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
    for file in files:
        entries = _entries(file)
        first = (2, 0, 1) if _AMERICAN.match(file.head) else (2, 1, 0)
        dates = dict.fromkeys(head.group(1, 2, 3) for head, _, _ in entries)
        order = _date_order(list(dates), first)
        names = Counter(name for _, name, _ in entries)
        # A notice may look like a person with a long name who says one thing.
        once = {name for name, count in names.items() if count == 1 and len(name.split()) > 4}
        # A mark before the text is the sign of a notice, unless the language sets it everywhere.
        marked = 2 * sum(lines[0].startswith(_NOTICE) for _, _, lines in entries) < len(entries)
        convert = partial(_whatsapp_message, order=order, once=once, marked=marked)
        yield from _cut(_messages(((file.name, entry) for entry in entries), convert, options))


def _date_order(dates: Sequence[Sequence[str]], first: Sequence[int]) -> Sequence[int]:
    """Places of year, month and day in the dates of a file, which are in the order of the file.

    It is the order with most valid dates, then the one in which time goes back least often, then
    the one with the fewest days from the first to the last, then `first`.
    """
    rated: list[tuple[int, int, int, int, Sequence[int]]] = []
    for order in (first, (2, 1, 0), (2, 0, 1), (0, 1, 2)):
        days = [day.toordinal() for parts in dates if (day := _day(parts, order))]
        back = sum(later < earlier for earlier, later in pairwise(days))
        span = max(days, default=0) - min(days, default=0)
        rated.append((-len(days), back, span, len(rated), order))
    return min(rated)[-1]


def _day(parts: Sequence[str], order: Sequence[int]) -> date | None:
    year, month, day = (int(parts[place]) for place in order)
    year += 2000 if year < 100 else -543 if year > 2400 else 0  # the Thai calendar
    try:
        return date(year, month, day)
    except ValueError:
        return None


def _whatsapp_message(
    entry: _Entry, order: Sequence[int], once: Container[str], marked: bool
) -> Row | None:
    head, name, lines = entry
    text = "\n".join(lines)
    words, hour = head[4] + head[8], int(head[5])
    if after := re.search(_AFTERNOON, words, re.I) or re.search(_FORENOON, words, re.I):
        hour = hour % 12 + (12 if re.fullmatch(_AFTERNOON, after[0], re.I) else 0)
    parts = head.group(1, 2, 3)
    day = _day(parts, order) or "/".join(parts)
    time = f"{day}T{hour:02}:{int(head[6]):02}:{int(head[7] or 0):02}"
    if not name or name in once:
        return None
    notice = marked and text.startswith(_NOTICE)
    text = re.sub(_MARK, "", re.sub(_EDITED, "", text)).strip()
    name = re.sub(_MARK, "", name).removeprefix("~").strip()
    if files := re.findall(_ATTACHED, text):
        words = [attachment_kind(next(filter(None, samples))) for samples in files]
        return _said(name, re.sub(_ATTACHED, "", text), time, *words)
    bare = re.fullmatch(r"<[^<>]*>|null", text) is not None
    if len(text) < 60 and (notice or bare) and re.search(_OMITTED, text.strip("<>"), re.I):
        words = (kind for kind, stems in _KINDS.items() if re.search(stems, text, re.I))
        return _said(name, "", time, next(words, "file"))
    left = notice or re.fullmatch(_DELETED, text, re.I)
    return None if left else _said(name, text, time)


LAYOUTS = (
    Layout("Slack export", 'CHANNEL/2024-01-05.json: [{"type": "message", "user": "U1", '
           '"ts": "1404141523.000006", "text": "hi"}]', _is_slack, _slack),
    Layout("Discord export (DiscordChatExporter)", '{"guild": {…}, "channel": {"id": "1"}, '
           '"messages": [{"author": {"name": "Mia"}, "timestamp": "…", "content": "hi"}]}',
           lambda file: has_keys(file, "guild", "channel", "messages"),
           partial(_chats, _discord_message)),
    Layout("Telegram export", '{"name": "Mia", "type": "personal_chat", "messages": [{"id": 1, '
           '"type": "message", "date": "2024-01-05T10:00:00", "from": "Mia", "text": "hi"}]}',
           lambda file: has_keys(file, "messages", "from_id")
           or has_keys(file, "about", "personal_information"), partial(_chats, _telegram_message)),
    Layout("WhatsApp chat", "05/01/2024, 10:00 - Mia: hi", _is_whatsapp, _whatsapp),
)  # fmt: skip
