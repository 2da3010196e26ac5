"""What made rows of the Humanual domains news, opinion and politics are written from."""

from __future__ import annotations

from soulkit.tasks.humanual.texts import Domain, Stance, Topic


def _news(category: str, title: str, top: str, cost: str, gain: str, claim: str) -> Topic:
    seen = (("channel", title), ("viewer", top))
    return Topic(category, seen, {"cost": cost, "gain": gain, "claim": claim})


NEWS = Domain(
    "videos",
    (
        Stance(
            "asks of everything who is going to pay for it",
            (
                ("And who pays? {cost}, that's who.", "They never say that in the video."),
                ("Follow the money.", "In the end it lands on {cost}."),
            ),
        ),
        Stance(
            "is glad of any progress and tired of people who see only the bad side",
            (
                (
                    "People complain about everything.",
                    "{gain}, and that is more than we had last year.",
                ),
                ("Good for them!", "{gain}. I hope it works out."),
            ),
        ),
        Stance(
            "trusts no report that does not show where its numbers come from",
            (
                ("'{claim}', says who?", "No source in the video and none below it."),
                ("I stopped watching at '{claim}'.", "Show the data or leave it."),
            ),
        ),
    ),
    (
        _news(
            "transport",
            "City closes its centre to cars: what changes on Monday",
            "About time.",
            "the people who have to drive to work",
            "Children will be able to cross the road",
            "traffic falls by half",
        ),
        _news(
            "energy",
            "A village heats itself with waste water",
            "My uncle lives there, it works.",
            "everybody with a water bill",
            "A whole village without oil",
            "it pays for itself in four years",
        ),
        _news(
            "space",
            "The probe is back: dust from an asteroid",
            "Goosebumps at minute six.",
            "the taxpayer, as usual",
            "We hold something older than the Earth",
            "the dust is four billion years old",
        ),
        _news(
            "housing",
            "Empty offices become flats",
            "I would move in tomorrow.",
            "the tenants, in their rent",
            "Three hundred people get a home",
            "every second office stands empty",
        ),
        _news(
            "school",
            "No phones in class: a year later",
            "As a teacher: finally.",
            "parents who cannot reach their child",
            "They talk to each other in the breaks",
            "marks rose by a tenth",
        ),
    ),
)


def _post(category: str, text: str, promise: str, whose: str, told: str) -> Topic:
    return Topic(category, (("poster", text),), {"promise": promise, "whose": whose, "told": told})


OPINION = Domain(
    "forum",
    (
        Stance(
            "thinks that a promise counts for more than anybody's mood",
            (
                (
                    "YTA, sorry. {promise}, and then you did not.",
                    "Everything else in your post is decoration.",
                ),
                ("You gave your word: {promise}.", "Keep it first and argue afterwards."),
            ),
        ),
        Stance(
            "thinks that whoever owns a thing decides about it",
            (
                ("NTA. {whose}, end of story.", "They can be disappointed, they cannot be angry."),
                ("{whose}.", "I do not see what there is to discuss."),
            ),
        ),
        Stance(
            "forgives nearly everything except things done behind somebody's back",
            (
                (
                    "The thing itself is small. That {told} is not.",
                    "I would be hurt too, so mild YTA.",
                ),
                ("ESH. It would have been fine, but {told}.", "Say sorry for that part."),
            ),
        ),
    ),
    (
        _post(
            "family",
            "AITA for selling the piano? My sister learned on it and I had said she could "
            "have it one day, but I need the room and it was left to me. I told her after it "
            "was gone.",
            "You said she could have it",
            "It was left to you",
            "she heard of it when it was gone",
        ),
        _post(
            "flat",
            "AITA for having my partner over most nights? When we moved in I agreed on two "
            "nights a week. I pay more than half of the rent. My flatmate found out from the "
            "neighbour how often it is.",
            "You agreed on two nights",
            "You pay more than half",
            "your flatmate heard it from the neighbour",
        ),
        _post(
            "work",
            "AITA for not driving a colleague any more? I said I would for this year, but it "
            "is my car and it costs me twenty minutes. I just left earlier without a word.",
            "You said you would for this year",
            "It is your car",
            "you left without a word",
        ),
        _post(
            "wedding",
            "AITA for wearing what I like? I had promised my cousin to wear green like the "
            "others. It was my own money and I came in blue; she learned it at the church "
            "door.",
            "You promised to wear green",
            "It was your own money",
            "she learned it at the church door",
        ),
        _post(
            "friends",
            "AITA for lending out the tent? I had promised it to a friend for May, but it is "
            "mine and somebody needed it now. He saw it in a picture.",
            "You promised him the tent for May",
            "The tent is yours",
            "he had to see it in a picture",
        ),
    ),
)


def _article(category: str, text: str, plan: str, local: str, gap: str) -> Topic:
    return Topic(category, (("author", text),), {"plan": plan, "local": local, "gap": gap})


POLITICS = Domain(
    "articles",
    (
        Stance(
            "wants decisions taken as near as possible to those who live with them",
            (
                (
                    "You never ask why the capital should decide on this at all.",
                    "Leave it to {local}, whom we can at least vote out.",
                ),
                ("Let {local} choose.", "What fits one place need not fit the next."),
            ),
        ),
        Stance(
            "thinks that only one rule for all is fair",
            (
                (
                    "I am with you on {plan}, if it is for everybody.",
                    "With exceptions it becomes a game for those who can afford advice.",
                ),
                (
                    "I can only be for {plan} if there are no exceptions.",
                    "Once you start making them, those with lawyers win.",
                ),
            ),
        ),
        Stance(
            "looks first at what a proposal leaves out",
            (
                (
                    "You write well, but there is not a word on {gap}.",
                    "That is where such plans usually fail.",
                ),
                ("And {gap}?", "I could take the rest seriously if that had been thought through."),
            ),
        ),
    ),
    (
        _article(
            "housing",
            "The rent of a new flat should follow a public index. It would end a lottery that "
            "punishes whoever moves. Other countries do it, and they still build.",
            "the index",
            "the town councils",
            "who is to build for such rents",
        ),
        _article(
            "transport",
            "Buses and trains should be free. We pay for roads together and ask nobody for a "
            "ticket at the kerb.",
            "free buses",
            "the districts",
            "places that no bus goes to",
        ),
        _article(
            "voting",
            "Voting should be a duty, as paying taxes is. A parliament that half of the "
            "people chose speaks for half of them.",
            "a duty to vote",
            "the states",
            "people who want none of those on the list",
        ),
        _article(
            "schools",
            "No child should be sorted at ten. Let all of them learn together until sixteen, "
            "and put the money into smaller classes.",
            "a common school",
            "the schools themselves",
            "where the teachers are to come from",
        ),
        _article(
            "farming",
            "Subsidies should go to soil, not to hectares. Whoever lets the ground recover "
            "should be paid for it.",
            "paying for soil",
            "the regions",
            "how anybody would measure it",
        ),
    ),
)
