"""Short forms of words that a stop ends, and names that numbers stand behind."""

from __future__ import annotations

from model_families.omnistage_nano.forms import MONTHS

ALWAYS = {
    "mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "vs": "versus",
    "approx": "approximately", "dept": "department", "jr": "junior", "sr": "senior", "e.g": "for example",
    "i.e": "that is", "ph.d": "P H D", "bros": "brothers", "ave": "avenue", "blvd": "boulevard", "rd": "road",
}  # fmt: skip
# Where a capital follows, the stop ends the sentence, too.
OR_ENDS = {
    "etc": "etc", "a.m": "A M", "p.m": "P M", "inc": "incorporated", "ltd": "limited", "corp": "corporation",
    "co": "company",
}  # fmt: skip
BEFORE_NUMBERS = {
    "no": "number", "nos": "numbers", "p": "page", "pp": "pages", "vol": "volume", "fig": "figure",
    "eq": "equation", "ch": "chapter", "sec": "section", "min": "minimum", "max": "maximum",
    "tel": "telephone",
}  # fmt: skip
BEFORE_NAMES = {
    "st": "saint", "mt": "mount", "ft": "fort", "gen": "general", "sen": "senator", "rev": "reverend",
    "capt": "captain", "lt": "lieutenant", "sgt": "sergeant", "gov": "governor", "pres": "president",
    "rep": "representative", "col": "colonel", "hon": "honorable",
}  # fmt: skip
BEHIND_NAMES = {"st": "street"}
MONTHS_BY_START = {month[:3].lower(): month for month in MONTHS} | {"sept": "September"}
DAYS_BY_START = {
    day[:length].lower(): day
    for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    for length in (3, 4, 5)
}
OTHER_WORDS = frozenset({"mar", "may", "sat", "sun", "jan", "march"})  # which some of those are as well
SLASHED = {"w/o": "without", "w/": "with", "n/a": "N A"}

# Who is told apart by numbers: "the eighth".
RULERS = frozenset(
    """
    henry louis george charles edward james william elizabeth mary richard philip napoleon francis pius paul
    frederick john benedict gregory leo innocent alexander nicholas peter catherine ferdinand ptolemy ramses
    xerxes darius carlos juan felipe gustav harald olav haakon christian albert leopold baudouin umberto
    victor ivan otto rudolf maximilian clement urban boniface sixtus julius stephen margrethe cleopatra
    """.split()  # noqa: SIM905
)
# What is counted: "two". Anything else that a capital begins, too, unless its number is a single letter.
PARTS = frozenset("war part chapter act volume book phase title section article scene".split())  # noqa: SIM905
# Capitals at the beginning of a sentence, which are no names.
NO_NAMES = frozenset(
    """
    the an a this that these my your our his her its their he she it we they you i in on at and or but if for
    with no not use there here when what why how so then
    """.split()  # noqa: SIM905
)
