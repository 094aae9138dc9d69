"""The fixed words of the training sentences."""

from __future__ import annotations


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


VERBS = _listed(
    "make take see find give tell call keep let begin show hear play run move live believe bring "
    "write sit stand lose pay meet include continue set learn change lead watch follow stop create "
    "speak read spend grow open walk win teach offer remember love consider appear buy serve die send "
    "build stay fall cut reach kill raise pass sell decide return explain hope develop carry break "
    "receive agree support hit produce eat cover catch draw choose cause point listen realize place "
    "close involve visit clean cook paint plant push pull hold like want need use help work start "
    "turn ask try feel leave put mean know think look come go say get wash fix save borrow lend join "
    "miss enjoy finish check count measure"
)
_IRREGULAR_PAIRS = _listed(
    "make:made take:took see:saw find:found give:gave tell:told keep:kept let:let begin:began "
    "hear:heard run:ran bring:brought write:wrote sit:sat stand:stood lose:lost pay:paid meet:met "
    "set:set lead:led speak:spoke read:read spend:spent grow:grew win:won teach:taught buy:bought "
    "send:sent build:built fall:fell cut:cut sell:sold break:broke hit:hit eat:ate catch:caught "
    "draw:drew choose:chose hold:held feel:felt leave:left put:put mean:meant know:knew think:thought "
    "come:came go:went say:said get:got lend:lent"
)
_IRREGULAR = dict(pair.split(":") for pair in _IRREGULAR_PAIRS)
SUBJECTS = _listed("I you we they he she it")
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _listed("January February March April May June July August September October November December")
PREPOSITIONS = _listed(
    "in on at by with from under over near behind beside after before without across around into "
    "through about between for to of against toward during inside outside above below along"
)
MODALS = _listed("will can must should could would may might")
JOINS = _listed("and but so because while when if although since until or before after unless")
CONTRACTIONS = _listed(
    "I'm you're we're they're it's he's she's that's there's what's don't doesn't didn't can't won't "
    "couldn't shouldn't wouldn't isn't aren't wasn't weren't haven't hasn't I'll we'll you'll they'll "
    "I've we've let's"
)
PLACES = _listed("city river country school house garden kitchen forest island market hospital street office")
OPENERS = (
    "Well, ",
    "Of course, ",
    "Yes, ",
    "No, ",
    "Actually, ",
    "Sure, ",
    "For example, ",
    "However, ",
    "In fact, ",
    "First, ",
    "Then ",
    "Sometimes ",
    "Maybe ",
    "Today ",
    "Finally, ",
    "Sorry, ",
    "Please note that ",
    "I think ",
    "I believe that ",
    "Remember that ",
    "Thank you, ",
)
SMALL_TALK = (
    "Hello, how can I help you today?",
    "Thank you very much.",
    "You're welcome.",
    "Good morning!",
    "Good night.",
    "How are you?",
    "I'm sorry, I don't know.",
    "Please say that again.",
    "What time is it?",
    "See you tomorrow.",
    "Nice to meet you.",
    "That is a good question.",
    "I am a computer program.",
    "Can you help me, please?",
    "Let me think about it.",
    "What is your name?",
    "My name is Smol.",
    "Have a nice day!",
    "I don't understand.",
    "Yes, that is right.",
)


def third(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if verb[-1] == "y" and verb[-2] not in "aeiou" else verb + "s"


def past(verb: str) -> str:
    if verb in _IRREGULAR:
        return _IRREGULAR[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb == "stop":
        return "stopped"
    return verb[:-1] + "ied" if verb[-1] == "y" and verb[-2] not in "aeiou" else verb + "ed"
