"""The table "What works where" of the README is what machines have found with `python -m ms_gradaccum test`.

Their files are in docs/hardware. After a new one this writes the table anew::

    python tests/project/test_hardware.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
COLUMNS = [(dtype, mode) for dtype in ("float32", "float16", "bfloat16") for mode in ("PYNATIVE", "GRAPH")]


def row_of(parallel, processes):
    kind = re.sub(r"HSDP (level\d)", r"HSDP, `\1`", parallel)
    return kind + (f", {processes} processes" if processes > 1 else "")


def in_words(outcomes):
    """Return the results of the cells of one entry of the table."""
    if not outcomes:
        return "not tried"
    failed = outcomes.count("failed")
    if failed:
        return f"failed: {failed} of {len(outcomes)}"
    return "passed" if "passed" in outcomes else "skipped"


def rows_of(found):
    rows = {}
    for cell in found["cells"]:
        # A state is also loaded in one process that several have saved; costs are only reported.
        if "bare parts" not in cell["name"]:
            entries = rows.setdefault(row_of(cell["parallel"], cell["processes"]), {})
            entries.setdefault((cell["dtype"], cell["mode"]), []).append(cell["outcome"])
    return [
        [found["device"], row, *(in_words(entries.get(column)) for column in COLUMNS)] for row, entries in rows.items()
    ]


def table(files):
    rows = [["machine", "parallel", *map(", ".join, COLUMNS)], ["---"] * (2 + len(COLUMNS))]
    for device in ("CPU", "GPU", "Ascend"):
        machines = [row for found in files if found["device"] == device for row in rows_of(found)]
        rows += machines or [[device, "all", *["not tried"] * len(COLUMNS)]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], lines[1].replace(" ", ""), *lines[2:]])


def files():
    return [json.loads(file.read_text()) for file in sorted((ROOT / "docs" / "hardware").glob("*.json"))]


def found_in(page, heading):
    """The first table after a heading."""
    text = page.read_text()
    return re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M).group().rstrip()


def test_the_table_is_what_the_files_say():
    assert found_in(PAGE, "## What works where") == table(files())


def test_the_chinese_table_has_one_word_for_each_of_the_english_one():
    tables = [found_in(PAGE, "## What works where"), found_in(ROOT / "README_CN.md", "## 哪些组合测试过")]
    english, chinese = ([line.split(" | ") for line in each.splitlines()] for each in tables)
    assert [len(row) for row in english] == [len(row) for row in chinese]
    pairs = {pair for rows in zip(english, chinese) for pair in zip(*rows)}
    assert len(pairs) == len({word for word, _ in pairs}) == len({word for _, word in pairs})


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(found_in(PAGE, "## What works where"), table(files())))
