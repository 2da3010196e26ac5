"""Rows of `lifechoices`: invented people whose remembered deeds show what drives them.

The memory of a `plain` row shows one drive three times, among deeds that show nothing. In a
`changed` row it shows another drive first, then a turning point, then the one that counts now. The
four options are what four drives would do in one situation, so a row is solved by reading the
memory and asking who acts like that.

    {"character_name": "Corin Vale", "book": "The Salt Road", "input_text": "Corin Vale is a ...",
     "Multiple Choice Question": {"Scenario": "Soldiers ask at Corin's ...", "Question": "What will
     Corin do?", "Options": ["Name a price ...", ...], "Correct Answer": "C"}, "kind": "plain"}
"""

from __future__ import annotations

import random
from typing import Any

FIRST = (
    "Corin", "Mirela", "Tavish", "Oda", "Benedek", "Sunniva", "Lazar", "Petra", "Iwan", "Calla",
    "Rurik", "Nadia", "Osric", "Vilja", "Anselm", "Zora",
)  # fmt: skip
LAST = ("Vale", "Brandt", "Ostrow", "Hale", "Quill", "Marsh", "Tolland", "Reyes", "Fenn", "Dorn")
BOOKS = (
    "The Salt Road", "A House by the Weir", "Nine Lanterns", "The Clockmaker's Winter",
    "Ashes of Tarn", "The Ferry at Low Water", "Letters to Nobody", "The Long Harvest",
)  # fmt: skip
JOBS = ("ferryman's child", "weaver", "clerk", "carter", "innkeeper", "bell founder", "gardener")
TOWNS = ("Tarn", "Low Weir", "Saltby", "Gelm", "Orrin", "Maidenford")

DRIVES: dict[str, tuple[str, ...]] = {
    "honest": (
        "{n} once broke a jug that nobody would have missed, and walked two miles to own up to it.",
        "When the baker gave back too much change, {n} counted it out again on the counter.",
        "{n} lost a place in an office for refusing to enter a sum that was not so.",
        "Asked by a bride how the dress looked, {n} said that it did not suit her, and was never "
        "invited again.",
    ),
    "loyal": (
        "{n} took the blame for a broken window so that {f} could keep an apprenticeship.",
        "For three winters {n} brought {f} soup, after everybody else had turned away.",
        "{n} gave up a wedding journey because {f} had sent for help.",
        "Nobody has spoken ill of {f} in {n}'s hearing twice.",
    ),
    "cautious": (
        "{n} carries a second key and a second purse, and has needed neither.",
        "When others walked out on the first ice, {n} stood on the bank until February.",
        "{n} asked three physicians about one powder, and in the end did not take it.",
        "The night the bridge fell, {n} alone had gone round by the ford.",
    ),
    "proud": (
        "{n} slept in a barn rather than ask a cousin for a bed.",
        "When a rich aunt sent a coat, {n} sent it back unworn and went cold that year.",
        "{n} has not said a word to the smith since a joke at a harvest supper, eleven years ago.",
        "Offered a pardon for a bow, {n} stayed in the lock-up two more weeks.",
    ),
    "generous": (
        "{n} gave a winter's firewood to a family with a newborn, and burned the chairs instead.",
        "Whoever came to {n}'s door with an empty bowl left with a full one.",
        "{n} sold a good watch to pay the fine of somebody whose name {n} did not know.",
        "On pay days {n} comes home with half, having met people on the way.",
    ),
    "ambitious": (
        "{n} learned to write at night, having noticed that those who write give the orders.",
        "Before turning twenty {n} had left three masters for better ones.",
        "At funerals {n} already knows who will get the post that has fallen free.",
        "{n} keeps a list of people who matter and greets them in that order.",
    ),
}
"""Drive → deeds that show it, without naming it."""

SITUATIONS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "On the road {n} finds a purse with the seal of {p}, who once struck {n} in the street. "
        "Nobody is near.",
        {
            "honest": "Carry the purse to {p} and tell exactly where it lay",
            "loyal": "Bring the purse to {f}, whose rent is overdue, and keep nothing back",
            "cautious": "Leave the purse where it lies and take another road home",
            "proud": "Have a stranger deliver it, so as to hear no thanks from {p}",
            "generous": "Share the coins among the beggars at the town gate",
            "ambitious": "Buy the market stall that has long been for sale",
        },
    ),
    (
        "The river is rising and cuts off the far bank, where {f} lives. {p} holds out a rope and "
        "calls for somebody to swim across.",
        {
            "honest": "Say aloud that the rope is rotten and that changing it was {n}'s own duty",
            "loyal": "Jump in at once, since it is {f} who is over there",
            "cautious": "Stay on the hill until the water falls",
            "proud": "Wave {p}'s rope away and cross without anybody's help",
            "generous": "Hand the last boat and all blankets to families {n} has never met",
            "ambitious": "Agree to swim in return for the post of river warden",
        },
    ),
    (
        "{f} stands before the judge for a theft that {n} saw happen. {n} is called to speak.",
        {
            "honest": "Tell the judge what was seen, every part of it",
            "loyal": "Swear that {f} was at home all night",
            "cautious": "Fall ill on the day of the hearing and say nothing either way",
            "proud": "Refuse to be questioned by somebody of lower standing",
            "generous": "Pay the robbed shopkeeper out of {n}'s savings and ask for no receipt",
            "ambitious": "Let the judge know that a place at court would help the memory",
        },
    ),
    (
        "An uncle has left {n} a house. Only {n} heard him promise it to {p} on his last evening.",
        {
            "honest": "Repeat the promise to the notary, word for word",
            "loyal": "Open the house to {f}, who has lost a roof, whatever {p} may say",
            "cautious": "Sign nothing until every other heir has spoken",
            "proud": "Turn the house down, as it comes from a man who used to laugh at {n}",
            "generous": "Give the house to the parish for its orphans",
            "ambitious": "Move in at once and let rooms to wealthy travellers",
        },
    ),
    (
        "A captain offers {n} a berth on an old ship that sails tonight. {f} lies in bed with a "
        "fever.",
        {
            "honest": "Tell the captain about an earlier desertion before saying anything else",
            "loyal": "Sit by {f}'s bed and let the ship go",
            "cautious": "Decline, for the hull is old and the season late",
            "proud": "Decline, for the captain did not take off a hat while asking",
            "generous": "Pass the berth on to a younger hand with children to feed",
            "ambitious": "Be on board before midnight and ask for the mate's cabin",
        },
    ),
    (
        "The night before the guild awards its prize, {n}'s piece is spoiled. {f} competes as "
        "well. {p} offers {n} a finished piece to show.",
        {
            "honest": "Show the spoiled piece and say that {n} had left the door open",
            "loyal": "Withdraw, so that {f} has one rival less",
            "cautious": "Wait for next year rather than show anything in haste",
            "proud": "Work through the night alone rather than touch anything of {p}'s",
            "generous": "Spend the night helping an apprentice who owns no tools",
            "ambitious": "Call on two of the guild's elders before they vote",
        },
    ),
    (
        "Soldiers ask at {n}'s door for {p}, who is hiding in the cellar at {f}'s request.",
        {
            "honest": "Answer that {p} is in the cellar, since that is what was asked",
            "loyal": "Send them the wrong way, because {f} asked for it",
            "cautious": "Keep the shutters closed as if nobody were at home",
            "proud": "Order them off the doorstep for not having knocked properly",
            "generous": "Ask them all in for supper, and leave {p} the warmest coat to flee in",
            "ambitious": "Name a price for what the cellar holds",
        },
    ),
)
"""Situation, and what each drive does in it."""

QUIET = (
    "{n} likes the smell of wet slate and cannot whistle.",
    "The window of {n}'s room looks on a yard with a pear tree.",
    "On Sundays {n} mends nets and hums the same four notes.",
    "{n} has a scar on the left thumb from an oyster knife.",
    "In summer {n} walks to the mill pond before breakfast.",
    "{n} reads slowly and remembers every word of it.",
    "There is a song about {town} that {n} never sings to the end.",
    "{n} owns a grey dog that sleeps under the bench.",
)
TURNS = (
    "Then came the fever year, and those who had known {n} before said that somebody else had "
    "got up from that bed.",
    "After the fire nothing about {n} was as it had been, and {n} said so without regret.",
    "Seven years in another country followed, of which {n} never speaks; the one who came back had "
    "other ways.",
)
ASKED = ("What will {n} do?", "What does {n} decide?", "Which course does {n} take?")


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"lifechoices/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    who = dict(zip("nfp", rng.sample(FIRST, 3), strict=True)) | {"town": rng.choice(TOWNS)}
    full = f"{who['n']} {rng.choice(LAST)}"
    scenario, acts = rng.choice(SITUATIONS)
    drive, *others = rng.sample(sorted(DRIVES), 4)
    changed = index % 3 == 2
    options = [drive, *others]
    rng.shuffle(options)
    return {
        "character_name": full,
        "book": rng.choice(BOOKS),
        "input_text": _memory(rng, {**who, "full": full}, drive, others[0] if changed else ""),
        "Multiple Choice Question": {
            "Scenario": scenario.format(**who),
            "Question": rng.choice(ASKED).format(**who),
            "Options": [acts[option].format(**who) for option in options],
            "Correct Answer": "ABCD"[options.index(drive)],
        },
        "kind": "changed" if changed else "plain",
        "index": index,
    }


def _memory(rng: random.Random, who: dict[str, str], drive: str, former: str) -> str:
    """The life so far: deeds of the former drive and a turning point first, where there is one."""
    quiet = rng.sample(QUIET, 4)
    parts = [f"{{full}} is a {rng.choice(JOBS)} from {{town}}. {{f}} is an old friend."]
    if former:
        early = [*rng.sample(DRIVES[former], 2), quiet.pop()]
        rng.shuffle(early)
        parts += ["This is told of the early years.", *early, rng.choice(TURNS)]
    late = [*rng.sample(DRIVES[drive], 3), *quiet]
    rng.shuffle(late)
    return " ".join([*parts, *late]).format(**who)
