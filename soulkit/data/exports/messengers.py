"""Reads chats between people: exports of Slack, Discord, Telegram and WhatsApp.

Every message has its speaker's name as exported and its time. Notices of the app (joins, calls,
deleted messages) and messages of bots are left out; forwarded messages are not learned. A chat is
cut into conversations: in Slack by thread, and by day outside of threads; elsewhere by pauses.
"""

from __future__ import annotations

import hashlib
import html
import io
import mimetypes
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import records
from soulkit.data.files import BadRow, unreadable_file

Row = dict[str, Any]
PAUSE = 6 * 3600
"""Seconds of silence that end a conversation: a night, but not a working day."""
NOTICES = "notices of the app and messages of bots"


def has_keys(file: ExportFile, *keys: str) -> bool:
    """Whether all these keys of JSON objects are in the head of a file."""
    return all(re.search(rb'"%s"\s*:' % key.encode(), file.head) for key in keys)


def kind_of(name: Any) -> str:
    """`image`, `video`, `audio` or `file`, by a media type or the name of a file."""
    names = (str(name), mimetypes.guess_type(str(name))[0] or "")
    found = (word for word in names if word.startswith(("image/", "video/", "audio/")))
    return next(found, "file/").partition("/")[0]


def _message(speaker: Any, text: str, time: str, *kinds: str, **more: Any) -> Row | None:
    """None without content. ValueError if the time is not in ISO 8601."""
    attached = {"attachments": list(kinds)} if kinds else {}
    iso = datetime.fromisoformat(time).isoformat()
    said = {"speaker": str(speaker), "content": text.strip(), "time": iso, **attached, **more}
    return said if text.strip() or kinds else None


def _iso(seconds: str) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).isoformat()


def _converted(
    convert: Callable[[Any], Row | None], entries: Iterable[Any], place: str, options: ReadOptions
) -> Iterator[tuple[Any, Row | BadRow]]:
    """(entry, message or BadRow); notices are counted."""
    for entry in entries:
        try:
            message = entry if isinstance(entry, BadRow) else convert(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = BadRow(place, f"a message cannot be read: {type(error).__name__}: {error}")
        options.left_out[NOTICES] += message is None
        if message is not None:
            yield entry, message


def _row(talk: Sequence[Row]) -> Row:
    """The id depends on the first message only, and names no one: ids are not redacted."""
    talk = talk if talk[0]["time"] <= talk[-1]["time"] else talk[::-1]  # the newest came first
    first = "\n".join(str(talk[0][key]) for key in ("time", "speaker", "content"))
    return {"id": hashlib.sha256(first.encode()).hexdigest()[:12], "messages": list(talk)}


def _cut(messages: Iterable[tuple[Any, Row | BadRow]]) -> Iterator[Row | BadRow]:
    """The conversations of one chat."""
    talk: list[Row] = []
    last = 0.0
    for _, message in messages:
        if isinstance(message, BadRow):
            yield message
            continue
        now = datetime.fromisoformat(message["time"]).timestamp()
        if talk and abs(now - last) > PAUSE:
            yield _row(talk)
            talk = []
        talk.append(message)
        last = now
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
            found = {str(one.get("id")): _slack_name(one) for one in listed}
            count = Counter(found.values())  # two people may have one name
            names |= {k: name if count[name] == 1 else f"{name} ({k})" for k, name in found.items()}
        else:
            channels[str(place.parent)].append(file)
    for days in channels.values():
        threads: dict[str, list[Row]] = defaultdict(list)
        for day in sorted(days, key=lambda file: file.name):
            entries = (entry for _, entry in records(day, "item"))
            convert = partial(_slack_message, names=names)
            for entry, message in _converted(convert, entries, day.name, options):
                if isinstance(message, BadRow):
                    yield message
                    continue
                thread = entry.get("thread_ts", entry["ts"])
                alone = thread == entry["ts"] and not entry.get("reply_count")
                threads["" if alone else thread].append(message)
            if "" in threads:
                yield _row(threads.pop(""))
        yield from map(_row, threads.values())


def _slack_name(person: Mapping[str, Any]) -> str:
    profile = person.get("profile") or person.get("user_profile") or {}
    names = (profile.get("display_name"), profile.get("real_name"), person.get("real_name"))
    return next((name for name in (*names, person.get("name"), person.get("user")) if name), "")


def _slack_message(entry: Mapping[str, Any], names: Mapping[str, str]) -> Row | None:
    if (entry.get("subtype") or "") not in _SPOKEN or "bot_id" in entry or "user" not in entry:
        return None

    def shown(match: re.Match[str]) -> str:
        sign, target, label = match.groups()
        if sign in ("@", "#"):
            return str(sign + (names.get(target) or label or target))
        return label or ("@" if sign else "") + target

    text = html.unescape(_MARKUP.sub(shown, entry.get("text") or ""))
    kinds = [kind_of(f.get("mimetype") or f.get("name")) for f in entry.get("files") or []]
    speaker = names.get(entry["user"]) or _slack_name(entry)
    return _message(speaker, text, _iso(entry["ts"]), *kinds)


# -- Discord (DiscordChatExporter) and Telegram --------------------------------------------------


def _streamed(file: ExportFile) -> Iterator[tuple[str, Row]]:
    """(id of its chat, message) for the entries of every list `messages`, at any depth."""
    import ijson

    ids: dict[str, Any] = {}
    builder, inside = None, ""
    with file.opener() as stream:
        stream.read(3 if file.head.startswith(b"\xef\xbb\xbf") else 0)
        try:
            for place, event, value in ijson.parse(stream, use_float=True):
                if builder is not None:
                    builder.event(event, value)
                    if event == "end_map" and place == inside:
                        yield str(ids.get(inside.removesuffix("messages.item"))), builder.value
                        builder = None
                elif event == "start_map" and place.endswith("messages.item"):
                    builder, inside = ijson.ObjectBuilder(), place
                    builder.event(event, value)
                elif place.endswith("id") and event in ("string", "number"):
                    ids[place.removesuffix("id").removesuffix("channel.")] = value
        except ijson.JSONError as error:
            raise unreadable_file(Path(file.name), f"not JSON: {error}") from error


def _nested(
    convert: Callable[[Any], Row | None],
) -> Callable[[Sequence[ExportFile], ReadOptions], Iterator[Row | BadRow]]:
    """The reader of files with lists of `messages`."""

    def rows(files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
        for file in files:
            for _, pairs in groupby(_streamed(file), key=lambda pair: pair[0]):
                entries = (entry for _, entry in pairs)
                yield from _cut(_converted(convert, entries, file.name, options))

    return rows


def _discord_message(entry: Mapping[str, Any]) -> Row | None:
    author = entry["author"]
    if entry.get("type", "Default") not in ("Default", "Reply") or author.get("isBot"):
        return None
    kinds = [kind_of(file.get("fileName")) for file in entry.get("attachments") or []]
    speaker = author.get("nickname") or author.get("name") or author["id"]
    return _message(speaker, entry.get("content") or "", entry["timestamp"], *kinds)


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
        kinds.append(_MEDIA.get(media or "") or kind_of(entry.get("mime_type")))
    others = {"trained": False} if "forwarded_from" in entry or "via_bot" in entry else {}
    speaker = entry.get("from") or entry["from_id"]  # a deleted account has no name
    time = entry.get("date") or _iso(entry["date_unixtime"])
    return _message(speaker, words, time, *kinds, **others)


# -- WhatsApp ------------------------------------------------------------------------------------

_MARK = "[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
_TO = rf"{_MARK}*[./-]\s?{_MARK}*"
_HEAD = re.compile(
    rf"{_MARK}*\[?(\d{{1,4}}){_TO}(\d{{1,2}}){_TO}(\d{{1,4}})([^\d\[\]]{{1,20}}?)(\d\d?)[:.](\d\d)"
    r"(?:[:.](\d\d))?([^\d:\[\]–-]{0,16}?)(?:\]|\s[-–])\s?(.*)"
)
"""Three parts of the date, words, hour, minute, second, words, and the rest of the line."""
_SPEAKER = re.compile(rf"(.{{1,80}}?)\s?{_MARK}*:(?:\s|$)(.*)")
_AFTERNOON = (
    r"p\.?\s?m|م|오후|下午|午後|晚上|中午|μ\.?μ|\bch\b|ös\b|\bdu\b|\bnm\b|odp|अपराह्न|ptg|אחה"
)
_FORENOON = r"a\.?\s?m|ص|오전|上午|午前|早上|凌晨|π\.?μ|\bsa\b|öö|\bde\b|\bvm\b|dop|पूर्वाह्न|לפנה"
_OMITTED = (
    r"omit|ausgeschlossen|weggelassen|\bomis|omess|absent|ocult|weggelaten|пропущен|отсутств|"
    r"без медиа|dahil edil|atlanmış|pominięt|استبعاد|مشمول|متضمن|נכלל|הושמט|शामिल नहीं|disertakan|"
    r"utel[äa]|udelad|vynech|jätetty|省略|略過|含まれて|생략|제외|^null$"
)
_KINDS = {
    "image": r"im+a[gi]|bild|foto|photo|afbeeld|görünt|изобр|фото|sti[ck]|gif|صور|תמונ|图|圖|画像",
    "video": r"v[ií]d[eé]|видео|فيديو|וידאו|视频|影片|動画|동영상",
    "audio": r"[aá]udio|аудио|\bses\b|صوت|语音|語音|音|오디오",
}
_ATTACHED = (
    r"<[^<>:\n]+:\s?([^<>\n]+\.\w{2,5})>|^([A-Z]{3}-\d{8}-WA\d+\.\w+) \([^()\n]+\)|"
    r"^([^\n]+\.\w{2,5}) \((?:file attached|Datei angehängt|archivo adjunto|fichier joint|"
    r"arquivo anexado|file allegato|bestand bijgevoegd|файл добавлен|dosya ekli|添付ファイル)\)"
)
_DELETED = (
    r"(this message was deleted|you deleted this message|diese nachricht wurde gelöscht|"
    r"du hast diese nachricht gelöscht|se eliminó este mensaje|eliminaste este mensaje|"
    r"ce message a été supprimé|vous avez supprimé ce message|questo messaggio è stato eliminato|"
    r"hai eliminato questo messaggio|(esta )?mensagem (foi )?apagada|você apagou esta mensagem|"
    r"dit bericht is verwijderd|данное сообщение удалено|вы удалили данное сообщение|"
    r"bu mesaj silindi|ta wiadomość została usunięta|تم حذف هذه الرسالة|حذفت هذه الرسالة|"
    r"הודעה זו נמחקה|מחקת הודעה זו)[ .]*"
)
_AMERICAN = re.compile(rb"\W*[1-9]\d?/[1-9]\d?/\d\d,[^\n]{5,12}[AP]M")
_EDITED = r"\s*(?:\u200e<[^<>\n:]*>|<This message was edited>)$"


def _lines(file: ExportFile) -> Iterator[re.Match[str] | str]:
    """The lines of a file; a match where a message begins."""
    with file.opener() as stream:
        for raw in io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="\n"):
            line = raw.rstrip("\r\n")
            yield _HEAD.match(line) or line


def _is_whatsapp(file: ExportFile) -> bool:
    lines = file.head.decode("utf-8-sig", "ignore").splitlines()[:100]
    heads = [_HEAD.match(line) for line in lines]
    named = any(_SPEAKER.match(head[9]) for head in heads if head)
    return file.name.lower().endswith(".txt") and named and heads[0] is not None


def _whatsapp(files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
    for file in files:
        dates: dict[Sequence[str], None] = {}
        names: Counter[str] = Counter()
        marked = 0
        for head in _lines(file):
            if not isinstance(head, str):
                dates[head.group(1, 2, 3)] = None
                said = _SPEAKER.match(head[9])
                names[said[1] if said else ""] += 1
                marked += bool(said and said[2].startswith(("\u200e", "\u200f")))
        first = (2, 0, 1) if _AMERICAN.match(file.head) else (2, 1, 0)
        order = _date_order(list(dates), first)
        if order is None:
            yield BadRow(file.name, "its dates have an unknown form")
            continue
        # A notice may look like a person with a long name who says one thing.
        once = {name for name, count in names.items() if count == 1 and len(name.split()) > 4}
        # A mark before the text is the sign of a notice, unless the language sets it everywhere.
        convert = partial(_whatsapp_message, order=order, marked=2 * marked < names.total())
        yield from _cut(_converted(convert, _spoken(file, once), file.name, options))


def _date_order(dates: Sequence[Sequence[str]], first: Sequence[int]) -> Sequence[int] | None:
    """Places of year, month and day in the dates of a file, which are in the order of the file.

    Of the orders that give valid dates it is the one in which time goes back least often, then the
    one with the fewest days from the first to the last, then `first`.
    """
    rated: list[tuple[int, int, int, Sequence[int]]] = []
    for order in (first, (2, 1, 0), (2, 0, 1), (0, 1, 2)):
        try:
            days = [_day(parts, order).toordinal() for parts in dates]
        except ValueError:
            continue
        back = sum(later < earlier for earlier, later in pairwise(days))
        rated.append((back, max(days) - min(days), len(rated), order))
    return min(rated)[-1] if rated else None


def _day(parts: Sequence[str], order: Sequence[int]) -> date:
    year, month, day = (int(parts[place]) for place in order)
    year += 2000 if year < 100 else -543 if year > 2400 else 0  # the Thai calendar
    return date(year, month, day)


def _spoken(file: ExportFile, once: set[str]) -> Iterator[tuple[re.Match[str], str, str]]:
    """(first line, speaker, text) of every message; the speaker of a notice is empty."""
    begun: tuple[re.Match[str], str] | None = None
    lines: list[str] = []
    for head in _lines(file):
        if isinstance(head, str):
            lines.append(head)
            continue
        if begun:
            yield *begun, "\n".join(lines)
        said = _SPEAKER.match(head[9])
        begun = head, said[1] if said and said[1] not in once else ""
        lines = [said[2] if said else ""]
    if begun:
        yield *begun, "\n".join(lines)


def _whatsapp_message(
    entry: tuple[re.Match[str], str, str], order: Sequence[int], marked: bool
) -> Row | None:
    head, name, text = entry
    words, hour = head[4] + head[8], int(head[5])
    if after := re.search(_AFTERNOON, words, re.I) or re.search(_FORENOON, words, re.I):
        hour = hour % 12 + (12 if re.fullmatch(_AFTERNOON, after[0], re.I) else 0)
    day = _day(head.group(1, 2, 3), order)
    time = f"{day}T{hour:02}:{int(head[6]):02}:{int(head[7] or 0):02}"
    notice = not name or (marked and text.startswith(("\u200e", "\u200f")))
    text = re.sub(_MARK, "", re.sub(_EDITED, "", text)).strip()
    name = re.sub(_MARK, "", name).removeprefix("~").strip()
    if name and (files := re.findall(_ATTACHED, text)):
        kinds = [kind_of(next(filter(None, found))) for found in files]
        return _message(name, re.sub(_ATTACHED, "", text), time, *kinds)
    bare = re.fullmatch(r"<[^<>]*>|null", text) is not None
    if name and len(text) < 60 and (notice or bare) and re.search(_OMITTED, text.strip("<>"), re.I):
        found = (kind for kind, stems in _KINDS.items() if re.search(stems, text, re.I))
        return _message(name, "", time, next(found, "file"))
    left = notice or re.fullmatch(_DELETED, text, re.I)
    return None if left else _message(name, text, time)


LAYOUTS = (
    Layout("Slack export", 'CHANNEL/2024-01-05.json: [{"type": "message", "user": "U1", '
           '"ts": "1404141523.000006", "text": "hi"}]', _is_slack, _slack),
    Layout("Discord export (DiscordChatExporter)", '{"guild": {…}, "channel": {"id": "1"}, '
           '"messages": [{"author": {"name": "Mia"}, "timestamp": "…", "content": "hi"}]}',
           lambda file: has_keys(file, "guild", "channel", "messages"), _nested(_discord_message)),
    Layout("Telegram export", '{"name": "Mia", "type": "personal_chat", "messages": [{"id": 1, '
           '"type": "message", "date": "2024-01-05T10:00:00", "from": "Mia", "text": "hi"}]}',
           lambda file: has_keys(file, "messages", "from_id")
           or has_keys(file, "about", "personal_information"), _nested(_telegram_message)),
    Layout("WhatsApp chat", "05/01/2024, 10:00 - Mia: hi", _is_whatsapp, _whatsapp),
)  # fmt: skip
