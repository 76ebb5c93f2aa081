"""The table "What works where" of both READMEs is what machines have found with `python -m ms_gradaccum test`.

Their files are in docs/hardware. After a new one this writes the tables anew::

    python tests/project/test_hardware.py
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "hardware"
DEVICES = ("CPU", "GPU", "Ascend")
COLUMNS = [(dtype, mode) for dtype in ("float32", "float16", "bfloat16") for mode in ("PYNATIVE", "GRAPH")]
# What the command says and what else is in the table, in the words of each page.
SAME = ("machine", "parallel", "passed", "failed", "skipped", "not tried", "all", "one process", "data parallel")
ENGLISH = {name: name for name in (*SAME, *DEVICES, "GRAPH", "PYNATIVE")} | {
    "semi-auto": "`AutoParallel`, without and with `hsdp`",
    "semi-auto, sharded operators": "`AutoParallel`, sharded operators, without and with `hsdp`",
    "HSDP level1": "HSDP, `level1`",
    "HSDP level2": "HSDP, `level2`",
    "processes": "{} processes",
    "of": "{}: {} of {}",
    "comma": ", ",
}
CHINESE = {
    "machine": "设备",
    "parallel": "并行方式",
    "passed": "通过",
    "failed": "失败",
    "skipped": "跳过",
    "not tried": "未试",
    "GRAPH": "静态图",
    "PYNATIVE": "动态图",
    "CPU": "CPU",
    "GPU": "GPU",
    "Ascend": "昇腾",
    "all": "全部",
    "one process": "单进程",
    "data parallel": "数据并行",
    "semi-auto": "`AutoParallel`（半自动并行），带或不带 `hsdp`",
    "semi-auto, sharded operators": "`AutoParallel`，算子级并行，带或不带 `hsdp`",
    "HSDP level1": "HSDP，`level1`",
    "HSDP level2": "HSDP，`level2`",
    "processes": "{} 个进程",
    "of": "{}：{}/{}",
    "comma": "，",
}
PAGES = {"README.md": ("## What works where", ENGLISH), "README_CN.md": ("## 哪些组合测试过", CHINESE)}


def row_of(parallel):
    """The row that a cell belongs to: all levels of one kind of sharding are one."""
    return re.sub(r"^(semi-auto.*), (plain|level\d)$", r"\1", parallel)


def in_words(outcomes, words):
    """Return the results of the cells of one entry of the table."""
    if not outcomes:
        return words["not tried"]
    failed = outcomes.count("failed")
    if failed:
        return words["of"].format(words["failed"], failed, len(outcomes))
    return words["passed" if "passed" in outcomes else "skipped"]


def rows_of(found, words):
    """The rows of one machine."""
    rows = {}
    for cell in found["cells"]:
        # A state is also loaded in one process that several have saved; costs are only reported.
        if "bare parts" not in cell["name"]:
            entries = rows.setdefault((row_of(cell["parallel"]), cell["processes"]), {})
            entries.setdefault((cell["dtype"], cell["mode"]), []).append(cell["outcome"])
    for (parallel, processes), entries in rows.items():
        is_distributed = words["comma"] + words["processes"].format(processes) if processes > 1 else ""
        yield [
            words[found["device"]],
            words[parallel] + is_distributed,
            *(in_words(entries.get(c), words) for c in COLUMNS),
        ]


def table(files, words):
    """The lines of the table."""
    heads = [words["comma"].join((dtype, words[mode])) for dtype, mode in COLUMNS]
    rows = [[words["machine"], words["parallel"], *heads], ["---"] * (2 + len(COLUMNS))]
    for device in DEVICES:
        machines = [found for found in files if found["device"] == device]
        rows += [row for found in machines for row in rows_of(found, words)]
        if not machines:
            rows.append([words[device], words["all"], *[words["not tried"]] * len(COLUMNS)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], lines[1].replace(" ", ""), *lines[2:]])


def files():
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def found_in(page, heading):
    """The first table after a heading."""
    return re.search(r"(?:^\|.*\n)+", page[page.index(heading) :], re.M).group().rstrip()


@pytest.mark.parametrize("page", PAGES)
def test_the_table_is_what_the_files_say(page):
    heading, words = PAGES[page]
    assert found_in((ROOT / page).read_text(), heading) == table(files(), words)


def test_a_failure_and_what_was_not_tried_show():
    cell = {"name": "MLP", "parallel": "semi-auto, level1", "dtype": "float32", "mode": "GRAPH", "processes": 2}
    cells = [cell | {"outcome": outcome} for outcome in ("passed", "failed")]
    cells += [cell | {"dtype": "bfloat16", "outcome": "skipped"}, cell | {"name": "bare parts", "outcome": "passed"}]
    lines = table([{"device": "Ascend", "cells": cells}], ENGLISH).splitlines()
    name = "`AutoParallel`, without and with `hsdp`, 2 processes"
    others = " | ".join(["not tried"] * 3)
    assert lines[-1] == f"| Ascend | {name} | not tried | failed: 1 of 2 | {others} | skipped |"
    assert lines[2] == f"| CPU | all | {' | '.join(['not tried'] * 6)} |"


@pytest.mark.parametrize("found", files(), ids=lambda found: found["device"])
def test_a_file_is_one_that_the_command_writes(found):
    assert found["format"] in (1, 2) and {"mindspore", "system", "cores and memory"} <= found["environment"].keys()
    for outcome in ("passed", "failed", "skipped"):
        assert found[outcome] == sum(cell["outcome"] == outcome for cell in found["cells"])
    # Nothing of the machine's user.
    assert "/home" not in json.dumps(found) and found["cells"]


if __name__ == "__main__":
    for name, (heading, words) in PAGES.items():
        path = ROOT / name
        path.write_text(path.read_text().replace(found_in(path.read_text(), heading), table(files(), words)))
