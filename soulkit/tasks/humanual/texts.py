"""What made rows of Humanual are written from: people, and the domains book, chat and email.

A domain has stances; a stance has a trait that a persona shows, and two ways of saying what a
person of that stance says about a topic. `{...}` in what is said is filled from the topic.
"""

from __future__ import annotations

from dataclasses import dataclass

JOBS = (
    "roofer", "nurse on nights", "retired bookbinder", "student of geology", "tram driver",
    "school cook", "tax clerk", "dog groomer", "piano tuner", "farm hand", "dental assistant",
    "locksmith", "translator", "lifeguard", "shipping agent", "florist",
)  # fmt: skip
TOWNS = (
    "a port town", "a village without a shop", "the suburbs", "a capital city", "a ski resort",
    "a mining town", "an island", "a student town",
)  # fmt: skip
PASTIMES = (
    "sings in a choir", "restores old radios", "plays chess by post", "grows tomatoes on a balcony",
    "coaches a girls' football team", "collects railway timetables", "bakes for the neighbours",
    "walks two dogs at dawn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stance:
    """A trait, in the words of a description, and two ways of saying what follows from it."""

    trait: str
    says: tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Topic:
    """What the person saw (role, text), and what the sayings of a stance are filled with."""

    category: str
    seen: tuple[tuple[str, str], ...]
    words: dict[str, str]


@dataclass(frozen=True, slots=True)
class Domain:
    dataset: str
    stances: tuple[Stance, ...]
    topics: tuple[Topic, ...]


def _book(category: str, title: str, about: str, slow: str, people: str, idea: str) -> Topic:
    seen = (("user", f"Title: {title}\n{about}\nWrite your review of this book."),)
    return Topic(category, seen, {"slow": slow, "people": people, "idea": idea})


BOOK = Domain(
    "reviews",
    (
        Stance(
            "reads for plot and gives up on books in which nothing happens",
            (
                (
                    "I nearly put it down at {slow}.",
                    "After that it moves, but two stars is all I have for a book that takes "
                    "so long to start.",
                ),
                (
                    "Somebody should have cut {slow}.",
                    "A good story is buried in there, and I was too bored to dig.",
                ),
            ),
        ),
        Stance(
            "reads for the people in a book and forgets the plot within a week",
            (
                (
                    "I would have followed {people} anywhere.",
                    "What happens hardly matters, five stars for the company.",
                ),
                (
                    "By the end {people} feel like neighbours.",
                    "I caught myself wondering what they are up to this week.",
                ),
            ),
        ),
        Stance(
            "wants to learn something from a book and marks pages with slips of paper",
            (
                (
                    "I have eleven slips in it, most of them where it is about {idea}.",
                    "Four stars, one off because there are no sources.",
                ),
                (
                    "Nobody has explained {idea} to me this well.",
                    "I could have done with less story around it.",
                ),
            ),
        ),
    ),
    (
        _book(
            "novel",
            "The Weir at Night",
            "A family saga around a mill, told by three sisters.",
            "the ninety pages about the river",
            "the three sisters",
            "how mills were run",
        ),
        _book(
            "crime",
            "Ten Keys",
            "A locksmith finds that every key he cut in May opens one door.",
            "the whole chapter of interviews",
            "the locksmith and his mother",
            "how locks work",
        ),
        _book(
            "popular science",
            "What Salt Remembers",
            "A chemist walks along old salt roads.",
            "the preparations for the walk",
            "the walker and the mule",
            "why salt was money",
        ),
        _book(
            "fantasy",
            "The Cartographer's War",
            "Two kingdoms fight over a map that changes.",
            "the council scenes",
            "the two map-makers",
            "projections and what they hide",
        ),
        _book(
            "memoir",
            "Night Shift",
            "Thirty years as a porter in one hospital.",
            "the school days",
            "the porters",
            "how a hospital is really run",
        ),
    ),
)


def _chat(category: str, asked: str, answer: str, thing: str, limit: str, point: str) -> Topic:
    seen = (("user", asked), ("assistant", answer))
    return Topic(category, seen, {"thing": thing, "limit": limit, "point": point})


CHAT = Domain(
    "chats",
    (
        Stance(
            "wants answers short enough for a phone screen and says so",
            (
                ("too long, give me {thing} in three lines", "no intro please"),
                ("shorter", "just {thing}, I read this on my phone"),
            ),
        ),
        Stance(
            "checks every claim and asks where it comes from",
            (
                ("Where do you have it from that {point}?", "Give me something I can look up."),
                ("Are you sure that {point}?", "I have read the opposite."),
            ),
        ),
        Stance(
            "brings in the circumstances only after a first answer",
            (
                (
                    "I should have said that {limit}.",
                    "Can you change {thing} so that it still works?",
                ),
                ("That would be fine, only {limit}.", "What would you do then?"),
            ),
        ),
    ),
    (
        _chat(
            "cooking",
            "how do I cook lentils so they don't fall apart",
            "Choose small green lentils, start them in cold water with a bay leaf, keep the water "
            "below a simmer, and salt them at the start; salt firms the skin.",
            "the recipe",
            "I only have a microwave",
            "salt at the start keeps them whole",
        ),
        _chat(
            "travel",
            "two days in a city I don't know, what should I do",
            "Pick one district for each day, walk in the morning, see one museum at noon when the "
            "streets are hot, and leave the second evening free; most cities are dull on Mondays.",
            "the plan",
            "I will have a toddler with me",
            "most cities are dull on Mondays",
        ),
        _chat(
            "code",
            "write me something that renames my photos by date",
            "Read the date from the photo's metadata, build a name from year, month, day and a "
            "counter, and rename a copy first. The date in a file's name is always reliable.",
            "the script",
            "some of the files have no metadata",
            "the date in a name is reliable",
        ),
        _chat(
            "letters",
            "help me write to my landlord about the heating",
            "Name the dates on which it failed, ask for a repair within a week, and keep a copy. "
            "A landlord has to answer any letter within three days.",
            "the letter",
            "we are on good terms and I want to stay so",
            "a landlord has to answer within three days",
        ),
        _chat(
            "health",
            "I can't sleep, what helps",
            "Get up at the same hour every day, leave the phone in another room, and do not lie "
            "awake for longer than twenty minutes. Warm milk has no effect at all.",
            "the advice",
            "I work in shifts",
            "warm milk has no effect",
        ),
    ),
)


def _mail(category: str, sender: str, text: str, task: str, day: str, other: str) -> Topic:
    seen = ((sender, text),)
    return Topic(category, seen, {"task": task, "day": day, "other": other, "who": sender})


EMAIL = Domain(
    "mail",
    (
        Stance(
            "answers at once, promises a date and keeps it",
            (
                ("{who}, you will have {task} by {day}.", "If anything changes I will call."),
                ("Got it.", "Count on {task} by {day}."),
            ),
        ),
        Stance(
            "passes on whatever is not squarely in the own remit",
            (
                ("{who}, {task} is really with {other} these days.", "I have copied them in."),
                ("I think {other} should look at this first.", "Happy to help once they have."),
            ),
        ),
        Stance(
            "never agrees to a date without asking what it is for",
            (
                (
                    "Before I start on {task}, what will it be used for?",
                    "If it is only for the file, {day} is too tight.",
                ),
                (
                    "Who reads {task} in the end?",
                    "I would rather do it well next week than badly by {day}.",
                ),
            ),
        ),
    ),
    (
        _mail(
            "finance",
            "Marta",
            "Could you send me the figures for the last quarter by Thursday? The board wants "
            "a page on every region.",
            "the regional page",
            "Thursday",
            "the controllers",
        ),
        _mail(
            "legal",
            "Joseph",
            "The counterparty came back with changes to clause nine. Can you mark it up today?",
            "the mark-up of clause nine",
            "tonight",
            "outside counsel",
        ),
        _mail(
            "meetings",
            "Ines",
            "We need somebody to take the minutes at Monday's call and to write the summary "
            "afterwards.",
            "the summary",
            "Tuesday",
            "the project office",
        ),
        _mail(
            "trading",
            "Walt",
            "The desk asks why the pipeline numbers differ from the ones that were nominated. "
            "Please look into it before the weekend.",
            "the reconciliation",
            "Friday",
            "scheduling",
        ),
        _mail(
            "staff",
            "Noor",
            "Two people start on the first. Could you set up their first week?",
            "the plan for the first week",
            "the twenty-fifth",
            "human resources",
        ),
    ),
)
