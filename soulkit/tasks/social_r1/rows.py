"""Rows of `social_r1`: short scenes that turn on what somebody means, feels, or does not know.

Six kinds take turns: irony, white lies, hints, hidden feelings, careless remarks, false beliefs.
What decides a scene is told in it (who was there, what somebody did a moment before), and `why`
says which part that is; only the writer of a worked example reads `why`.

    {"prompt_text": "Story: Ida had planned ...\\nQuestion: What does Ida mean?\\nA. ...\\nB. ...",
     "answer_letter": "B", "answer_text": "B. She finds the weather awful", "kind": "irony", ...}
"""

from __future__ import annotations

import random
from typing import Any

NAMES = (
    "Ada", "Bruno", "Chiara", "Deniz", "Elif", "Florian", "Gwen", "Hugo", "Ida", "Jaro", "Kaia",
    "Levi", "Mina", "Nils", "Olga", "Piet", "Runa", "Samir", "Tilda", "Vito",
)  # fmt: skip
THINGS = ("umbrella", "guitar", "bicycle pump", "tent", "lamp", "sewing kit", "drill", "kettle")
PLACES = ("cupboard", "shed", "hallway", "attic", "cellar", "car boot")

Scene = tuple[str, str, str, tuple[str, str, str], str]
"""Story, question, right option, other options, what decides it; `{a}`, `{b}` ... are filled in."""

SCENES: dict[str, tuple[Scene, ...]] = {
    "irony": (
        (
            "{a} had looked forward to the boat trip for weeks. In the morning rain was beating "
            "against the window and the harbour had been closed. {a} put the packed bag down and "
            "said to {b}: 'What a splendid day to be at sea.'",
            "What does {a} mean?",
            "That the weather has spoiled the trip",
            ("That sailing in the rain is a pleasure", "That {b} should pack a second bag",
             "That the harbour will open again by noon"),
            "The trip was closed off by the rain, so the praise cannot be meant as praise",
        ),
        (
            "{b} had promised to bring the {thing} and had forgotten it for the third time. {a} "
            "had to walk back across the whole town to fetch it. 'One can always count on you,' "
            "said {a}.",
            "What does {a} want {b} to understand?",
            "That {b} has let {a} down again",
            ("That {b} is the most dependable friend", "That the walk was a welcome exercise",
             "That {b} need not bring anything in future"),
            "It was the third time that the promise was broken, so the words mean their opposite",
        ),
        (
            "After two hours in the queue {a} reached the counter just as the clerk put up the "
            "sign 'closed'. {a} turned to {b} and said: 'They really do everything to make it easy "
            "for people.'",
            "How does {a} judge the office?",
            "As a place that does not care about those who wait",
            ("As a place that is run with great skill", "As a place that ought to close earlier",
             "As a place that {b} should apply to for work"),
            "Two hours of waiting ended before a closed counter, which is no making it easy",
        ),
        (
            "The removal men had set {a}'s wardrobe down in the wrong flat, lost two of its doors, "
            "and asked for a tip. 'I shall recommend you to all my enemies,' {a} told {b} on the "
            "stairs, loud enough for them to hear.",
            "What does {a} let the men know?",
            "That their work was bad",
            ("That they will get many new orders", "That {b} is going to move as well",
             "That the tip lies on the wardrobe"),
            "The doors are lost and the flat is wrong, and nobody wishes well to enemies",
        ),
    ),
    "white_lie": (
        (
            "{a} had cooked since noon. {b} took one spoonful of the soup, found it far too salty, "
            "and emptied the plate into a flower pot while {a} fetched bread. 'Was it good?' asked "
            "{a}. 'I could not have wished for a better soup,' said {b}.",
            "Why does {b} say so?",
            "To spare {a}, who went to such trouble",
            ("Because the soup was to {b}'s taste", "To be given a second plate of it",
             "Because {b} wants to know what is in it"),
            "What {b} did with the plate shows the real opinion, and the words protect the cook",
        ),
        (
            "{a} showed {b} a painting that had taken a whole winter. {b} had told a sister the "
            "day before that {a} should give up painting. 'You can see how much of you is in it,' "
            "said {b} now.",
            "Why does {b} choose these words?",
            "To avoid hurting {a} without calling the painting good",
            ("To ask {a} for the painting as a gift", "To tell {a} to take up another hobby",
             "To praise the picture above all others"),
            "The talk with the sister shows what {b} thinks, and the words step around it",
        ),
        (
            "{b} had been waiting for {a} in the cold for forty minutes and had missed a train "
            "because of it. When {a} came running, out of breath and close to tears, {b} said: "
            "'I have only just arrived.'",
            "Why does {b} say this?",
            "To keep {a} from feeling guilty",
            ("Because {b} came late as well", "To find out when the next train leaves",
             "To hide from {a} that there was another appointment"),
            "{b} had waited forty minutes, and {a} was upset already",
        ),
        (
            "{b} had seen {a} lose the race by half a lap. When {a} asked whether it had looked "
            "bad, {b}, who had watched every metre, answered: 'I was buying drinks just then.'",
            "Why does {b} claim to have been away?",
            "So as not to have to say how it looked",
            ("Because the drinks were being sold out", "So that {a} will pay for the drinks",
             "Because the race was dull to watch"),
            "{b} had watched every metre of a race that was lost by half a lap",
        ),
    ),
    "hint": (
        (
            "{a} was visiting {b}. The window stood wide open and {a} had been rubbing both arms "
            "for a while. 'It has turned quite autumnal in here,' said {a}.",
            "What would {a} like {b} to do?",
            "To shut the window",
            ("To talk about the seasons", "To come out for a walk", "To admire the view"),
            "Rubbing the arms shows that {a} is cold, and the window is what {b} can change",
        ),
        (
            "{a} and {b} shared a desk. {a} had to hand in a report at four, and {b} had been "
            "telling holiday stories since three. {a} looked at the clock and said: 'Four o'clock "
            "comes round faster every week.'",
            "What is {a} asking for?",
            "To be left to work in peace",
            ("To hear how the holiday ended", "To be told the exact time",
             "To go home together with {b}"),
            "The report is due at four, and the stories keep {a} from it",
        ),
        (
            "{b} was about to drive to the lake. {a}, whose bicycle was being repaired, stood at "
            "the garden gate with a towel over the shoulder. 'The bus does not run there on "
            "Sundays, does it?' asked {a}.",
            "What does {a} hope for?",
            "That {b} offers a seat in the car",
            ("That {b} repairs the bicycle", "That {b} stays at home as well",
             "That {b} knows another bus line"),
            "The towel shows where {a} wants to go, and the only way there is {b}'s car",
        ),
        (
            "{a} had invited {b} for seven, and it was close to midnight. {a} had carried out the "
            "glasses, turned off the music and yawned twice. 'You have an early train, as far as I "
            "remember,' said {a}.",
            "What would {a} like {b} to do?",
            "To leave now",
            ("To stay the night", "To put the music on again", "To wash the glasses"),
            "It is late, and everything {a} does brings the evening to its end",
        ),
    ),
    "hidden_feeling": (
        (
            "{a} and {b} had both applied for the one place in the choir. The list was put up: it "
            "was {b} who got in. {a} had cried in the cloakroom, washed, and now came out, smiled "
            "broadly and shook {b}'s hand.",
            "How does {a} feel at the handshake?",
            "Disappointed, though it should not be seen",
            ("Glad to be rid of the rehearsals", "Angry that {b} did not smile back",
             "Proud of having won the place"),
            "A moment before, {a} had cried over the list",
        ),
        (
            "{a} opened the present in front of everybody. It was the {thing} {a} had wished for "
            "all year. But {b}, sitting beside, had got nothing at all, so {a} put it away "
            "quickly and said evenly: 'Thank you, how kind.'",
            "What does {a} feel about the present?",
            "Great joy, held back because of {b}",
            ("Indifference, because it is of no use", "Annoyance at having to share it",
             "Regret at not having bought it alone"),
            "It was what {a} had wished for all year, and {b} had got nothing",
        ),
        (
            "Before the jump from the tower {a}'s knees trembled so much that {a} held on to the "
            "rail behind, where {b} could not see it. 'Shall we turn back?' asked {b}. 'What for?' "
            "said {a} and yawned.",
            "What does the yawn serve to do?",
            "To cover up fear",
            ("To show how little {a} slept", "To make {b} jump first", "To end the conversation"),
            "The knees trembled where {b} could not see it",
        ),
        (
            "{b} was telling everybody how {a} had once fallen into the harbour. {a} laughed too, "
            "but under the table one hand was tearing a paper napkin into ever smaller pieces.",
            "How does {a} take the story?",
            "As a humiliation, though without showing it",
            ("As the best joke of the evening", "As news that {a} had not heard before",
             "As a reason to go swimming again"),
            "The hand under the table, which nobody sees, does not laugh",
        ),
    ),
    "careless_remark": (
        (
            "{b} had cut {c}'s hair for the first time that morning. At supper {a}, who had just "
            "come home from a journey, looked at {c} and asked the table, {b} included: 'Which "
            "gardener did that to you?'",
            "What did {a} not know?",
            "That the hair had been cut by {b}",
            ("That {c} had gone to the gardener", "That supper would be late",
             "That {c} dislikes long hair"),
            "{a} came home only afterwards, so the morning was unknown",
        ),
        (
            "{b} had baked the cake and put it on the buffet without a word. {a} tried it, leaned "
            "over to {b} and whispered: 'Leave that one alone, somebody has mistaken the salt for "
            "sugar.'",
            "Why is the remark embarrassing?",
            "Because it is the baker whom {a} is warning",
            ("Because whispering disturbs the music", "Because {a} had salted the cake",
             "Because {b} wanted the last piece"),
            "{b} had brought the cake without saying so",
        ),
        (
            "{c} had given {a} a {thing} years ago. Now {a} was clearing out the flat with {c} and "
            "{b}, held it up and laughed: 'Who on earth buys a thing like that?' {c} said nothing "
            "and carried on.",
            "What had {a} forgotten?",
            "That it was once a present from {c}",
            ("That {b} collects such things", "That the flat was to be sold",
             "That it had been broken for years"),
            "The present lay years back, and {c} fell silent at the question",
        ),
        (
            "{b} and {c} had parted the week before and had told only their families. At the "
            "market {a}, who had been abroad for a month, met {b} alone and called out: 'And when "
            "are you two going to marry at last?'",
            "Why does {a} ask this?",
            "Because {a} has not heard of the parting",
            ("Because {a} wants to hurt {b}", "Because {c} had asked {a} to do so",
             "Because {b} has just got engaged"),
            "{a} was abroad for the month in which the two parted",
        ),
    ),
    "false_belief": (
        (
            "{a} put the {thing} into the {place} and went to work. While {a} was out, {b} lent it "
            "to a neighbour and forgot to mention it. In the evening {a} comes home and needs it.",
            "What will {a} do first?",
            "Look in the {place}",
            ("Ring at the neighbour's door", "Ask {b} to buy a new one",
             "Thank {b} for lending it out"),
            "{a} saw it last in the {place} and was told nothing",
        ),
        (
            "{a} and {b} agreed to meet at the fountain. Then {b} read that the square was closed "
            "and sent {a} a message to come to the station instead. {a}'s telephone had been lying "
            "on the kitchen table, without power, since noon, and {a} had left from work.",
            "Where does {a} expect to find {b}?",
            "At the fountain, as they had agreed",
            ("At the station, as the message says", "At home, next to the telephone",
             "At work, waiting by the door"),
            "The message lay on a telephone that {a} did not have",
        ),
        (
            "{b} filled the sugar bowl with salt as a joke while {a} was in the garden, and {c} "
            "watched it through the door. {a} comes in and makes tea for everybody.",
            "What does {a} believe the bowl holds?",
            "Sugar, as it always does",
            ("Salt, because {c} saw it", "Nothing, because {b} emptied it",
             "Tea, because it is tea time"),
            "{a} was in the garden when it was filled",
        ),
        (
            "{a} counted the money in the till and wrote down 340. While {a} was fetching the key, "
            "{b} changed a banknote for a customer and by mistake put 20 too much into the till. "
            "Then {a} locked it without counting again.",
            "How much does {a} take to be in the till?",
            "340, as was written down",
            ("360, as there really is", "320, because a customer was paid",
             "Nothing, because it is locked"),
            "{a} counted before {b} made the mistake, and not after it",
        ),
    ),
}  # fmt: skip
KINDS = tuple(SCENES)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"social_r1/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    story, question, right, others, why = rng.choice(SCENES[kind])
    filled = dict(zip("abc", rng.sample(NAMES, 3), strict=True))
    filled |= {"thing": rng.choice(THINGS), "place": rng.choice(PLACES)}
    options = [right, *rng.sample(others, rng.choice((2, 3)))]
    rng.shuffle(options)
    letter = "ABCD"[options.index(right)]
    lettered = [f"{'ABCD'[i]}. {text}" for i, text in enumerate(options)]
    lines = (f"Story: {story}", f"Question: {question}", *lettered)
    return {
        "prompt_text": "\n".join(lines).format(**filled),
        "answer_letter": letter,
        "answer_text": f"{letter}. {right}".format(**filled),
        "kind": kind,
        "why": why.format(**filled),
        "index": index,
    }
