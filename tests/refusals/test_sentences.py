"""One form for all messages: `For 'X', <what is wrong>, but got <value>. <What to do.>`"""

import ast
import re
from pathlib import Path

import pytest

import ms_gradaccum

PACKAGE = Path(ms_gradaccum.__file__).parent
VALUE = "…"  # Stands for what a message inserts.
# A relative clause in the place of a noun.
CLAUSE = re.compile(r"must be (one|some|that|those) (that|which|whose|over|of which|where)\b")


def text_of(node):
    """The text of a string in the code, with `VALUE` for what is inserted; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return None


def strings_of(path):
    """The line and the text of each string of a file that is no docstring."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node) if part is not node)
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
    for node in ast.walk(tree):
        text = text_of(node)
        if text is not None and id(node) not in skipped:
            yield node.lineno, text


# A message whose end stands elsewhere is left out.
MESSAGES = {
    f"{path.relative_to(PACKAGE)}:{line}": text
    for path in sorted(PACKAGE.rglob("*.py"))
    for line, text in strings_of(path)
    if re.match("For '.", text) and len(text.split()) > 3 and not re.search(rf"([: ]|[\w=] ?{VALUE})$", text)
}


def faults(message):
    """Return the faults in the form of a message."""
    first, _, rest = message.partition("\n")
    found = []
    if not re.match(rf"For '[\w{VALUE}{{}}]+', ", first):
        found.append("it does not name a class or function")
    if not re.search(rf"[.?:{VALUE}] ({VALUE}|[\w'].*[.?{VALUE}])$", first):
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
