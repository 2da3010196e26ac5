"""What made rows of `coser` are written from: people, what is at stake, and how each temper talks.

Every line of a temper is for one move in a quarrel about a thing: `open` it, `ask` what is meant,
`press`, `refuse`, `tell` what one knows, `doubt`, `offer`, `warn`, `yield` and `close`.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = (
    "Aldous", "Bettine", "Caspar", "Dorrit", "Emeric", "Fenella", "Gisbert", "Hanne", "Ignaz",
    "Jorunn", "Kester", "Ludmila", "Matthis", "Nerys", "Ottilie", "Piers", "Ragna", "Simeon",
)  # fmt: skip
LAST_HEADS = (
    "Ferr", "Strand", "Noll", "Wake", "Paaz", "Orr", "Thorn", "Lovell", "Rook", "Pell", "Moyl",
    "Ash", "Gray", "Colm", "Van", "Hall", "Sol", "Druc",
)  # fmt: skip
LAST_TAILS = ("by", "combe", "en", "field", "ick", "ing", "man", "ow", "sen", "tree")
"""Enough names that two books seldom have a character in common."""
CALLINGS = (
    "keeps the lock gates", "teaches the upper class", "mends nets and boats", "runs the inn",
    "copies deeds for the notary", "keeps bees behind the chapel", "drives the mail cart",
    "sets bones and sells herbs", "winds the tower clock", "collects the bridge toll",
)  # fmt: skip
TITLES = (
    "The Lock-Keeper's Ledger", "Salt on the Sill", "A Winter Without Bells", "The Orchard Wall",
    "Seven Miles of Towpath", "The Lamp at Corran Point", "What the Tide Kept", "The Glass Ferry",
    "Low Water, High Water", "The Surveyor's Daughters", "Ashlar", "The Long Table",
)  # fmt: skip
TOWN_HEADS = ("Salt", "Mill", "Corran", "Ash", "Low", "Thorn", "Wick", "Maiden", "Gull", "Stone",
              "Marl", "Ferris", "Oxen", "Black")  # fmt: skip
TOWN_TAILS = ("mere", "ford", "by", "haven", "stead", "wick", "bridge", "ley", "combe", "quay")
ROOMS = (
    "the back kitchen of the inn", "the boat shed", "the schoolroom after lessons",
    "the tower stair, halfway up", "the notary's front office", "the chapel yard",
    "the upper deck of the ferry", "the drying loft over the mill",
)  # fmt: skip
HOURS = (
    "It is the hour before dawn, and one candle burns", "Rain has kept everybody in since noon",
    "The last light lies red on the floor", "It is market day, and carts rattle outside",
    "Snow has fallen all night, and no sound comes from the road",
    "It is late, the fire is low, and nobody has thought of feeding it",
)  # fmt: skip
SURROUNDINGS = (
    "A gust rattles the shutters, and the light leans over and rights itself.",
    "Somewhere below a door falls shut; steps cross the yard and fade.",
    "The church clock strikes the quarter, a little late, as always.",
    "A dog barks twice and is told to be still.",
    "Water drips from the eaves into the stone trough, slower and slower.",
    "The boards creak, although nobody has moved.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Matter:
    """What a book turns on: a thing, what one side would do with it and the other, and why."""

    thing: str
    do: str
    leave: str
    hope: str
    fear: str
    known: str


MATTERS = (
    Matter("the toll book", "burn it before the assessor comes", "hand it to the assessor whole",
           "nobody would lose a house over old debts", "a burnt book accuses everybody",
           "two pages were cut out of it before Michaelmas"),
    Matter("the drowned man's letter", "read it aloud in the square", "give it to his widow sealed",
           "the town would learn who sent him out", "the widow would be the last to hear",
           "the seal was broken once and pressed again"),
    Matter("the old bell", "melt it down and pay the doctor", "hang it again for the feast",
           "the fever ward could open by spring", "a town without a bell forgets itself",
           "the crack in it is older than anybody admits"),
    Matter("the orchard", "sell it to the railway", "keep it and go into debt",
           "the young people would have a reason to stay", "what is sold once stays sold",
           "the railway has a second route on its maps"),
    Matter("the stranger in the loft", "send word to the garrison", "hide him until the thaw",
           "the soldiers would leave the village alone", "he would hang for what his brother did",
           "his coat carries the mark of the governor's own house"),
    Matter("the map of the shallows", "print it for every skipper", "lock it in the pilot's chest",
           "no more boats would be lost on the bar", "smugglers read maps as well as skippers do",
           "the third buoy stands where no chart has it"),
    Matter("the school prize", "give it to the carter's girl", "give it to the magistrate's son",
           "for once it would go to who earned it", "the magistrate pays for the roof",
           "the boy's essay is in his tutor's hand"),
)  # fmt: skip

TEMPERS: dict[str, dict[str, str]] = {
    "blunt": {
        "open": "I'll say it once. We should {want}.",
        "ask": "What is it you mean to do about {thing}? In plain words.",
        "press": "Tomorrow is too late. Today, {other}.",
        "refuse": "No. And you know why.",
        "tell": "Then hear this: {known}. I saw it.",
        "doubt": "That's a story for children.",
        "offer": "Half a year. If I'm wrong by then, have it your way.",
        "warn": "Think, {other}: {worry}.",
        "yield": "Fine. I don't like it. Fine.",
        "close": "Done, then. Get your coat.",
    },
    "courtly": {
        "open": "If I may, there is the question of {thing}, and I would ask leave to {want}.",
        "ask": "Would you be so good, {other}, as to tell us what you propose?",
        "press": "One hates to insist. And yet I find that I must.",
        "refuse": "You do me honour by asking, and I must decline.",
        "tell": "It pains me to be the one to mention it, but {known}.",
        "doubt": "I would not for the world call it untrue. It is merely hard to picture.",
        "offer": "Might we agree that both of us keep a key, and neither uses it alone?",
        "warn": "Permit me one thought before we go on: {worry}.",
        "yield": "You have the better of me, and I thank you for it.",
        "close": "Then let us part on that, and as friends.",
    },
    "wry": {
        "open": "Well, somebody has to bring up {thing}, and you have all looked at your shoes.",
        "ask": "And what does {other} want? Not to be asked, by the look of it.",
        "press": "We could also wait until it solves itself. That worked so well with the roof.",
        "refuse": "I would, but I have a conscience; it cost a good deal, and I hate to waste it.",
        "tell": "Here is a curious thing, since we are all so honest: {known}.",
        "doubt": "You believe that? You also believed the almanac.",
        "offer": "A wager, then. If it goes badly, I sweep your yard until Easter.",
        "warn": "I only point out, for the record, that {worry}.",
        "yield": "There goes my last principle. Mind the step.",
        "close": "Somebody write down the hour. We agreed on something.",
    },
    "anxious": {
        "open": "Please don't be angry, but I keep thinking we should {want}. Shouldn't we?",
        "ask": "You haven't told anybody, {other}? About {thing}, I mean? Nobody?",
        "press": "It has to be now, before somebody comes. Somebody always comes.",
        "refuse": "I can't. I'm sorry, I can't, don't ask me again.",
        "tell": "I wasn't going to say. But {known}, and I haven't slept since.",
        "doubt": "How can you be sure? How can anybody be sure of that?",
        "offer": "What if we only wait a week? A week harms nobody, does it?",
        "warn": "And nobody has thought of this, have they: {worry}.",
        "yield": "All right. All right. But you tell them, I won't.",
        "close": "Can we go now? I think I heard the gate.",
    },
    "fiery": {
        "open": "Enough whispering! Either we {want}, or we stop calling ourselves neighbours!",
        "ask": "Out with it, {other}! Whose side are you on in this?",
        "press": "Every hour that we sit here, somebody else decides for us!",
        "refuse": "Never. You may ask until the river runs uphill!",
        "tell": "You want the truth? {known}! There, now it is said!",
        "doubt": "Lies! Pretty ones, I grant you, but lies!",
        "offer": "Come with me, then! See it with your own eyes, and after that say no to my face!",
        "warn": "And when it happens, remember that I told you: {worry}!",
        "yield": "Have it! Have it, and be happy with it, if you can!",
        "close": "So be it. I will walk in front, as usual!",
    },
    "slow": {
        "open": "My grandmother said a thing left lying gathers flies. So: we might {want}.",
        "ask": "Let me understand it. What would you have us do with {thing}, {other}?",
        "press": "A field is ploughed when it is dry, not when one feels like it. It is dry now.",
        "refuse": "I have turned it over all night. It comes out as no each time.",
        "tell": "There is something I have kept to myself: {known}.",
        "doubt": "That may be. A good many things may be.",
        "offer": "Let it stand until the new moon, and let each ask one person they trust.",
        "warn": "I would weigh one thing more. It is this: {worry}.",
        "yield": "Well. An old tree bends too, if the wind keeps at it.",
        "close": "Then it is settled, and we can eat.",
    },
}

MANNERS: dict[str, str] = {
    "blunt": "says what there is to say in one breath and waits for no thanks",
    "courtly": "wraps every wish in so much courtesy that one notices it only afterwards",
    "wry": "jokes where others would weep, and is seldom taken for as serious as they are",
    "anxious": "hears danger in every footstep and asks three times where once would do",
    "fiery": "flares up fast, forgives fast, and cannot bear to be kept waiting",
    "slow": "thinks in proverbs and seasons, and has never been hurried into anything",
}
GESTURES: dict[str, tuple[str, ...]] = {
    "blunt": ("folds both arms", "sets the cup down hard", "does not look up"),
    "courtly": ("inclines the head", "smooths a glove", "offers the better chair"),
    "wry": ("raises an eyebrow", "studies the ceiling", "smiles with half the mouth"),
    "anxious": ("glances at the door", "twists a sleeve", "steps back to the wall"),
    "fiery": ("strikes the table", "paces to the window and back", "points at the others"),
    "slow": ("turns a hat round and round", "nods for a while", "fills a pipe"),
}
THOUGHTS: dict[str, tuple[str, ...]] = {
    "open": ("If I do not begin, nobody will.", "Now, while they are all in one room."),
    "ask": ("I want to hear it from them.", "They know more than they say."),
    "press": ("They are wavering.", "One more push, and they come round."),
    "refuse": ("I would not forgive myself.", "They must not see how near I am to giving in."),
    "tell": ("Perhaps this changes their mind.", "I have carried this alone for too long."),
    "doubt": ("It is too neat to be true.", "Who told them that, and why?"),
    "offer": ("There must be a way for both of us.", "Let them believe it was their idea."),
    "warn": ("Somebody has to say what can go wrong.", "They will blame me if I keep silent."),
    "yield": ("I am tired of being right alone.", "It is not worth losing them."),
    "close": ("Let it end here.", "Before anybody thinks better of it."),
}
