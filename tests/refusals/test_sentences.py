"""One form for all messages: `For 'X', <what is wrong>, but got <value>. <What to do.>`"""

import re

import pytest
from messages import STRINGS, VALUE

# A relative clause in the place of a noun.
CLAUSE = re.compile(r"must be (one|some|that|those) (that|which|whose|over|of which|where)\b")
# A message whose end stands elsewhere is left out.
MESSAGES = {
    place: text
    for place, text in STRINGS
    if re.match("For '.", text) and len(text.split()) > 3 and not re.search(rf"([: ]|[\w=] ?{VALUE})$", text)
}


def faults(message):
    first, _, rest = message.partition("\n")
    found = []
    if not re.match(rf"For '[\w{VALUE}{{}}]+', ", first):
        found.append("it does not name a class or function")
    if not re.search(rf"[.?:{VALUE}] ({VALUE}|[-\w'].*[.?{VALUE}])$", first):
        found.append("it ends without a way out")
    if len(re.findall(r"\bbut\b", first)) > 1:
        found.append("it has two 'but'")
    if CLAUSE.search(first):
        found.append("it describes a noun by a clause")
    return found


def test_a_fault_is_seen():
    good = "For 'Model', the argument 'network' must be a loss cell, but got None. Give a loss cell."
    assert faults(good) == []
    assert faults(good.replace("For 'Model', t", "T")) == ["it does not name a class or function"]
    assert faults(good.replace(" Give a loss cell.", "")) == ["it ends without a way out"]
    assert faults(good.replace("got None", "got nothing but None")) == ["it has two 'but'"]
    assert faults(good.replace("a loss cell, but", "one that has a loss, but")) == ["it describes a noun by a clause"]


@pytest.mark.parametrize("place", MESSAGES)
def test_each_message_has_the_form(place):
    assert faults(MESSAGES[place]) == [], MESSAGES[place]


def test_all_messages_are_read():
    assert len(MESSAGES) > 200
