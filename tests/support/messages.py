"""The strings of the package's sources: what it may say."""

import ast
from pathlib import Path

import ms_gradaccum

PACKAGE = Path(ms_gradaccum.__file__).parent
VALUE = "…"  # Stands for what a message inserts.


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


# The place and the text of each string of the package.
STRINGS = [
    (f"{path.relative_to(PACKAGE)}:{line}", text)
    for path in sorted(PACKAGE.rglob("*.py"))
    for line, text in strings_of(path)
]
