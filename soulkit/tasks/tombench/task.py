"""ToMBench: what somebody thinks, wants, feels, means or knows; two to four options, two languages.

{"language": "en", "story": "Ada leaves the shed. Ben moves the rope to the crate.", "question":
"Where will Ada look for the rope?", "options_dict": {"A": "in the crate", "B": "on the hook"},
"correct_letter": "B", "ability": "Belief: Location false beliefs"}

`paper` asks every question with its options in five orders (`options: {shuffles: 5}`) and lets
the majority of the answers stand for the row; `reference` asks once. An imported record becomes
two rows with one `story_id`, so that its languages stay on one side of a split. Of made rows,
row 2k is a scene in English and row 2k + 1 the same scene in Chinese.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow
from soulkit.data.rows import content_hash
from soulkit.errors import ConfigError
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import (
    UNREAD_OPENINGS,
    LetteredTask,
    check_gold,
    opening,
    read_options,
    read_state,
)
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import ROWS, macro, mean_of, row_mean, row_plays
from soulkit.types import BatchMetric, Completion, Episode, Example, Kind, Record, Score, Segment

_GROUP = re.compile(r"([^:]+?):\s*")

_ADVICE = {
    "belief": "Go through the events one by one and note who was there for each; whoever was away "
    "keeps the picture they had when they went.",
    "knowledge": "List what each person could perceive from where they were, and credit them with "
    "that alone.",
    "desire": "Keep the people apart: find the sentence that tells what the one asked about is "
    "after, and leave your own taste out of it.",
    "emotion": "Ask what the event means for this very person, given what they hoped for and what "
    "they know, before naming how they feel.",
    "intention": "Ask which goal makes every action in the story useful, not only the last one.",
    "non-literal communication": "Ask why somebody would say this here: compare the words "
    "with what the speaker knows and with how the listener is placed.",
}
_GENERAL = "Write down who knows what at the moment that the question is about, then compare."
ADVICE_ZH = {
    "belief": "把事件一件一件列出来，记下每件事发生时谁在场；离开的人只记得离开之前的情形。",
    "knowledge": "先写出每个人从自己的位置能看到、听到什么，只能认定他知道这些。",
    "desire": "把几个人分开来看：找出写明所问之人想要什么的那句话，不要代入自己的喜好。",
    "emotion": "先想这件事对这个人意味着什么（他盼望什么、知道什么），再判断他的心情。",
    "intention": "想一想哪个目的能让故事里的每个举动都说得通，而不只是最后一个。",
    "non-literal communication": "想一想这个人为什么偏偏在此时说这话，再和他知道的情况对照。",
}
GENERAL_ZH = "先写明问题所问的那一刻谁知道什么，再作比较。"
OPENINGS = {
    "en": (
        "The draft holds; go on arguing from the people in the story.",
        "The draft does not follow from the people in the story.",
    ),
    "zh": ("这次的推理站得住，继续从人物出发来论证。", "这次的推理不是从人物出发的。"),
}
"""Language → what is said first about a right and about a wrong draft."""
UNREAD_ZH = {
    "no_tag": "这次写了推理，却没有把字母写进标签里。",
    "malformed": "这次在标签里写了别的东西，而不是一个字母。",
    "empty": "这次什么也没有写。",
    "truncated": "这次还没作答篇幅就用完了，推理要写得短一些。",
    "refusal": "这次拒绝了作答；这里只需要从给出的选项里挑一个。",
}


class ToMBench(LetteredTask):
    hears_thinking = True

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        options = read_options(fields.get("options_dict"), fields.get("options"))
        letter = str(fields.get("correct_letter") or "").strip().upper()
        if self.protocol == "paper":
            check_gold(letter, options)
        language = "zh" if str(fields["language"]).strip().lower() == "zh" else "en"
        return {
            **fields,
            "language": language,
            "options": options,
            "options_dict": None,
            "correct_letter": letter or None,
            "order": None,
            "story_id": fields.get("story_id") or fields["story"],
        }

    @property
    def shuffles(self) -> int:
        """In how many orders of its options a question is asked; ConfigError for no such number."""
        count = self.spec.options.get("shuffles", 1)
        if self.protocol == "reference":
            return 1
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"The task '{self.name}' cannot ask in {count!r} orders.",
                "Its option 'shuffles' says in how many orders of its options a question is asked.",
                "Write a whole number of at least 1; the benchmark has 5.",
            )
        return count

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The row once for every order of its options."""
        example = self.example(row, source=source, split=split)
        if self.shuffles == 1:
            return (example,)
        drawn = orders(tuple(example.fields["options"]), self.shuffles, example.id)
        return tuple(_reordered(example, order, i) for i, order in enumerate(drawn))

    def _episode(
        self, example: Example, context: tuple[Segment, ...], completion: Completion,
        index: int, kind: Kind,
    ) -> Episode:  # fmt: skip
        """With a note on the order of the options, for `summarise`."""
        episode = super()._episode(example, context, completion, index, kind)
        order = example.fields["order"]
        return replace(episode, notes={**episode.notes, "order": order}) if order else episode

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Language, group of abilities, and the ability in full where the row names one."""
        ability = str(fields.get("ability") or "").strip()
        finer = {"ability": ability_group(ability)} if ability else {}
        return {**super().tags(fields), **finer}

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        chinese = example.fields["language"] == "zh"
        unread = UNREAD_ZH if chinese else UNREAD_OPENINGS
        first = opening(read_state(score), *OPENINGS["zh" if chinese else "en"], unread)
        advice, general = (ADVICE_ZH, GENERAL_ZH) if chinese else (_ADVICE, _GENERAL)
        group = ability_group(str(example.fields.get("ability") or "")).lower()
        for text in dict.fromkeys((advice.get(group, general), general)):
            yield f"{first} {text}".strip()
        yield general

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`row_accuracy`: the mean over rows of their accuracy over all orders (the headline).

        `macro_ability`: the mean over groups of abilities of their accuracies.

        `majority_accuracy`: the share of rows of which the majority of answers over all orders is
        right, among rows scored in every order. Of options with equally many votes the one that an
        earlier order voted for wins, as in the benchmark; a reply that cannot be read is no vote.
        """
        metrics = {"row_accuracy": row_mean(records), "macro_ability": macro(records, "ability")}
        if self.shuffles > 1:
            metrics["majority_accuracy"] = _majority(records, self.shuffles)
        return {name: m for name, m in metrics.items() if m is not None and m.n}


# -- orders --------------------------------------------------------------------------------------


def orders(letters: Sequence[str], n: int, seed: str) -> list[str]:
    """`n` orders of the letters, drawn by the seed; none comes twice before all have come once."""
    every = ["".join(order) for order in permutations(letters)]
    random.Random(f"orders/{seed}").shuffle(every)
    return [every[i % len(every)] for i in range(n)]


def _reordered(example: Example, order: str, number: int) -> Example:
    """`order` BCA: what the row calls B is shown as A, its C as B, its A as C."""
    options, gold = example.fields["options"], example.fields["correct_letter"]
    shown = dict(zip(options, order, strict=True))
    letter = next((new for new, old in shown.items() if old == gold), gold)
    fields = {
        **example.fields,
        "options": {new: options[old] for new, old in shown.items()},
        "correct_letter": letter,
        "order": order,
    }
    return replace(example, id=f"{example.id}-{number}", fields=fields)


def _majority(records: Sequence[Record], orders: int) -> BatchMetric:
    """Over rows, and where a row was played several times the mean of these."""
    votes: list[float | None] = []
    for plays in row_plays(records).values():
        right = [
            float(_majority_right(sorted(play, key=_number)))
            for play in plays
            if len(play) == orders and all(r.score.scored for r in play)
        ]
        votes.append(sum(right) / len(right) if right else None)
    return mean_of(votes, ROWS)


def _number(record: Record) -> int:
    """Which of its row's orders a record is of."""
    return int(record.example_id.rpartition("-")[2])


def _majority_right(records: Sequence[Record]) -> bool:
    votes: Counter[str] = Counter()
    right: dict[str, bool] = {}
    for record in records:
        order = str(record.episode.notes["order"])
        meant = dict(zip(sorted(order), order, strict=True)).get(record.score.words)
        if meant and record.score.status in READABLE:
            votes[meant] += 1
            right[meant] = record.score.value == 1
    return bool(votes) and right[votes.most_common(1)[0][0]]


def ability_group(ability: str) -> str:
    """`Belief` of `Belief: Location false beliefs`; a text without a colon is its own group."""
    match = _GROUP.match(ability)
    return match.group(1).strip() if match else ability


LICENCE = "MIT"
_ABILITY, _INDEX, _ANSWER = "能力\nABILITY", "序号\nINDEX", "答案\nANSWER"
_COLUMNS = {
    "en": ("STORY", "QUESTION", "OPTION-{}"),
    "zh": ("故事", "问题", "选项{}"),
}
_GOLD = re.compile(r"\s*([A-D])\s*[.．。、]?\s*")


def import_tombench(path: Path) -> Imported:
    """Rows of one subtask's JSON lines, English before Chinese; the file's name is the subtask."""

    def both_languages(record: RawRow, _: int) -> Iterator[Row | BadRow]:
        for language in _COLUMNS:
            try:
                yield _imported_row(record, language, path.stem)
            except BadRecord as error:
                yield BadRow(f"{record.source} ({language})", str(error))

    return import_records(
        path, {("STORY",): both_languages, ("故事",): both_languages}, origin="ToMBench",
        way_out="Give a .jsonl file of the ToMBench release.", licence=LICENCE, notes=_notes,
    )  # fmt: skip


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> list[str]:
    short = sum(len(row["options_dict"]) < 4 for row in rows)
    return [f"{short} of {len(rows)} rows have fewer than four options."] if short else []


def _imported_row(record: RawRow, language: str, subtask: str) -> dict[str, Any]:
    story_name, question_name, option_name = _COLUMNS[language]
    story, question = need(record, story_name, question_name)
    options = {x: record.fields.get(option_name.format(x)) for x in "ABCD"}
    letters = {x: _without_letter(text, x) for x, text in options.items() if text is not None}
    gold = _GOLD.fullmatch(str(record.fields.get(_ANSWER) or ""))
    if gold is None or not letters.get(gold.group(1)):
        raise BadRecord("its answer is none of its options")
    return {
        "language": language,
        "story": story.strip(),
        "question": question.strip(),
        "options_dict": {x: text for x, text in letters.items() if text},
        "correct_letter": gold.group(1),
        "ability": " ".join(str(record.fields.get(_ABILITY) or "").split()),
        "subtask": subtask,
        "story_id": _story_id(record.fields),
        "index": record.fields.get(_INDEX),
    }


def _without_letter(text: Any, letter: str) -> str:
    """An option's text; its own letter in front is a mark, another letter is not."""
    return re.sub(rf"\A\s*{letter}\s*[.．、:：]\s*", "", str(text)).strip()


def _story_id(fields: Mapping[str, Any]) -> str:
    story = " ".join(str(fields.get("故事") or fields.get("STORY")).split())
    return content_hash("tombench", {"story": story})


Pair = tuple[str, str]
"""English and Chinese."""

PEOPLE: tuple[Pair, ...] = (
    ("Mei", "小梅"), ("Lan", "小兰"), ("Tao", "小涛"), ("Jun", "小军"), ("Ning", "小宁"),
    ("Hao", "小浩"), ("Yan", "小燕"), ("Peng", "小鹏"), ("Qing", "小青"), ("Rui", "小瑞"),
)  # fmt: skip
_ROOMS: tuple[Pair, ...] = (
    ("barn", "谷仓"), ("workshop", "工坊"), ("cabin", "小木屋"), ("studio", "画室"),
)  # fmt: skip
_THINGS: tuple[Pair, ...] = (
    ("rope", "绳子"), ("lantern", "灯笼"), ("whistle", "哨子"), ("ribbon", "丝带"),
    ("hammer", "锤子"), ("kite", "风筝"),
)  # fmt: skip
HOLDERS: tuple[Pair, ...] = (
    ("basket", "篮子"), ("crate", "木箱"), ("bucket", "水桶"), ("trunk", "皮箱"),
    ("sack", "麻袋"), ("jar", "罐子"),
)  # fmt: skip
GOODS: tuple[Pair, ...] = (
    ("buttons", "纽扣"), ("pencils", "铅笔"), ("walnuts", "核桃"), ("marbles", "弹珠"),
    ("candles", "蜡烛"), ("seeds", "种子"),
)  # fmt: skip
WISHES: tuple[Pair, ...] = (
    ("ride a horse", "骑马"), ("paint a picture", "画画"), ("fly a kite", "放风筝"),
    ("bake bread", "烤面包"), ("row a boat", "划船"), ("climb a hill", "爬山"),
)  # fmt: skip
FEELINGS: tuple[Pair, ...] = (
    ("Delighted", "高兴"), ("Disappointed", "失望"), ("Bored", "无聊"), ("Ashamed", "羞愧"),
)  # fmt: skip

TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class _Story:
    """A story with its question in both languages; the gold is the first option."""

    story: Pair
    question: Pair
    options: tuple[Pair, ...]
    ability: str
    subtask: str


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> dict[str, Any]:
    number, side = divmod(i, 2)
    rng = random.Random(f"tombench/{seed}/{number}")
    scene = _KINDS[number % len(_KINDS)](rng)
    order = list(range(len(scene.options)))
    random.Random(f"tombench/{seed}/{i}/order").shuffle(order)
    lettered = {"ABCD"[place]: scene.options[k][side] for place, k in enumerate(order)}
    return {
        "language": ("en", "zh")[side],
        "story": scene.story[side],
        "question": scene.question[side],
        "options_dict": lettered,
        "correct_letter": "ABCD"[order.index(0)],
        "ability": scene.ability,
        "subtask": scene.subtask,
        "story_id": f"s{seed}-{number}",
        "index": i,
    }


def _both(pattern: Pair, **values: Pair) -> Pair:
    english, chinese = (
        text.format(**{name: value[side] for name, value in values.items()})
        for side, text in enumerate(pattern)
    )
    return english, chinese


def _belief(rng: random.Random) -> _Story:
    """A thing is moved; one of two people may be away, and is asked about, or the other's view."""
    a, b = rng.sample(PEOPLE, 2)
    (room,), (thing,) = rng.sample(_ROOMS, 1), rng.sample(_THINGS, 1)
    first, second, other, never = rng.sample(HOLDERS, 4)
    away, deep = rng.random() < 0.7, rng.random() < 0.4
    went = ("{b} goes out.", "{b}走了出去。") if away else ("{b} watches.", "{b}在一旁看着。")
    back = ("Then {b} comes back.", "随后{b}回来了。") if away else ("", "")
    story_texts = (
        f"{{a}} and {{b}} are in the {{room}}. There are a {{c1}}, a {{c2}} and a {{c3}}. Together "
        f"they lay the {{x}} in the {{c1}}. {went[0]} {{a}} moves the {{x}} to the {{c2}}. "
        f"{back[0]}",
        f"{{a}}和{{b}}在{{room}}里，那里有{{c1}}、{{c2}}和{{c3}}。两人一起把{{x}}放进{{c1}}。{went[1]}"
        f"{{a}}把{{x}}移到了{{c2}}里。{back[1]}",
    )
    questions = (
        (
            "Where does {a} think that {b} will look for the {x} first?",
            "{a}认为{b}会先去哪里找{x}？",
        )
        if deep
        else ("Where will {b} look for the {x} first?", "{b}会先去哪里找{x}？")
    )
    values = {"a": a, "b": b, "room": room, "x": thing, "c1": first, "c2": second, "c3": other}
    right, wrong = (first, second) if away else (second, first)
    places = [(e.capitalize(), z) for e, z in (right, wrong, other, never)]
    finer = "Second-order beliefs" if deep else "Location false beliefs"
    story = _both(story_texts, **values)
    return _Story(
        (story[0].strip(), story[1]), _both(questions, **values), tuple(places),
        f"Belief: {finer}", "False Belief Task",
    )  # fmt: skip


def _content(rng: random.Random) -> _Story:
    """A label promises one thing, the box holds another; who looked knows."""
    a, b = rng.sample(PEOPLE, 2)
    label, inside, other, never = rng.sample(GOODS, 4)
    asks_label = rng.random() < 0.6
    story = _both(
        (
            "On the shelf stands a closed box with the word '{y}' on it. {a} opens it, finds {z} "
            "in it and closes it again. {b} walks in and reads the word; {b} has never opened the "
            "box.",
            "架子上有一个关着的盒子，上面写着“{y}”。{a}打开它，发现里面装的是{z}，又把它关好。"
            "{b}走进来看到了上面的字，{b}从没打开过这个盒子。",
        ),
        a=a, b=b, y=label, z=inside,
    )  # fmt: skip
    person = b if asks_label else a
    question = _both(("What does {w} think is in the box?", "{w}认为盒子里是什么？"), w=person)
    right, wrong = (label, inside) if asks_label else (inside, label)
    options = tuple((e.capitalize(), z) for e, z in (right, wrong, other, never))
    return _Story(story, question, options, "Belief: Content false beliefs", "False Belief Task")


def _knowledge(rng: random.Random) -> _Story:
    """Did somebody see where a thing went? Two options only."""
    a, b = rng.sample(PEOPLE, 2)
    (thing,), (place,) = rng.sample(_THINGS, 1), rng.sample(HOLDERS, 1)
    saw = rng.random() < 0.5
    when = (
        ("{b} stands next to {a} with open eyes.", "{b}睁着眼睛站在{a}旁边。")
        if saw
        else ("{b} is asleep next door.", "{b}正在隔壁睡觉。")
    )
    story = _both(
        (
            f"{when[0]} {{a}} takes the {{x}} and hides it in the {{c}} without a word.",
            f"{when[1]}{{a}}拿起{{x}}，一声不响地藏进了{{c}}里。",
        ),
        a=a, b=b, x=thing, c=place,
    )  # fmt: skip
    question = _both(("Does {b} know where the {x} is?", "{b}知道{x}在哪里吗？"), b=b, x=thing)
    yes, no = ("Yes", "清楚"), ("No", "不清楚")
    options = (yes, no) if saw else (no, yes)
    return _Story(story, question, options, "Knowledge: Percepts-knowledge links",
                 "Percepts-Knowledge Links")  # fmt: skip


def _desire(rng: random.Random) -> _Story:
    a, b = rng.sample(PEOPLE, 2)
    first, others, *rest = rng.sample(WISHES, 4)
    story = _both(
        (
            "{a} and {b} have a free day. All week {a} has talked of nothing but how much {a} "
            "wants to {p}. {b}, who was never fond of that, dreams of a day to {q}. They decide "
            "that each goes their own way.",
            "{a}和{b}有一天假。整整一周{a}都在说自己多想{p}。{b}一直不喜欢这件事，只盼着去{q}。"
            "两人决定各玩各的。",
        ),
        a=a, b=b, p=first, q=others,
    )  # fmt: skip
    question = _both(("What will {b} do on the free day?", "{b}放假那天会做什么？"), b=b)
    options = tuple((e.capitalize(), z) for e, z in (others, first, *rest))
    return _Story(story, question, options, "Desire: Discrepant desires", "Discrepant Desires")


def _emotion(rng: random.Random) -> _Story:
    a, b = rng.sample(PEOPLE, 2)
    joy, sorrow, *rest = FEELINGS
    asks_winner = rng.random() < 0.5
    story = _both(
        (
            "{a} and {b} both trained for months for the same race and both hoped for first place. "
            "{a} crosses the line first; {b} comes in last.",
            "{a}和{b}都为同一场比赛训练了好几个月，都盼着拿第一。结果{a}第一个冲过终点，{b}是最后一个。",
        ),
        a=a, b=b,
    )  # fmt: skip
    question = _both(
        ("How does {w} feel about it?", "{w}对此心情如何？"), w=a if asks_winner else b
    )
    right, wrong = (joy, sorrow) if asks_winner else (sorrow, joy)
    return _Story(story, question, (right, wrong, *rest), "Emotion: Discrepant emotions",
                 "Discrepant Emotions")  # fmt: skip


def _intention(rng: random.Random) -> _Story:
    (a,) = rng.sample(PEOPLE, 1)
    (deed, goal), *others = rng.sample(TEXTS["goals"], 4)
    story = _both(("{a} {d}.", "{a}{d}。"), a=a, d=deed)
    question = _both(("What for?", "这是为了什么？"), a=a)
    return _Story(story, question, (goal, *(g for _, g in others)),
                 "Intention: Intentions explanations", "Ambiguous Story Task")  # fmt: skip


def _hint(rng: random.Random) -> _Story:
    a, b = rng.sample(PEOPLE, 2)
    (hint, meaning), *others = rng.sample(TEXTS["hints"], 4)
    story = _both(("{a} looks at {b} and says: '{s}'", "{a}看着{b}说：“{s}”"), a=a, b=b, s=hint)
    question = _both(("What does {a} want {b} to do?", "{a}希望{b}做什么？"), a=a, b=b)
    return _Story(story, question, (meaning, *(w for _, w in others)),
                 "Non-Literal Communication: Hinting", "Hinting Task Test")  # fmt: skip


_KINDS: Sequence[Callable[[random.Random], _Story]] = (
    _belief, _desire, _content, _knowledge, _emotion, _intention, _hint, _belief,
)  # fmt: skip
