"""docs/arguments.md has each argument of the classes that it lists, with the default of the signature."""

import inspect
import re
from pathlib import Path

import mindspore as ms
import pytest

import ms_gradaccum

PAGE = (Path(__file__).parents[2] / "docs" / "arguments.md").read_text()
CLASSES = "GradAccumulation TrainOneStepCell Model Accumulator AccumulationConfig TokenMeanLoss MixedPrecision".split()
CLASSES += "DataParallel HSDP Reduced StateCheckpoint ProgressBar MetricsLogger".split()
# Arguments that only their text names: MindSpore's own, which have one value.
OF_TEXT = {"TrainOneStepCell": {"sens", "return_grad", "network", "optimizer"}}


def rows_of(heading):
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def listed(name):
    """The arguments of a class on the page, with their defaults."""
    defaults = {}
    headings = [heading for heading in re.findall("^## (.+)$", PAGE, re.M) if name in re.findall(r"\w+", heading)]
    if name in ("TrainOneStepCell", "Model", "Accumulator"):
        headings.append("Options of a training step")
    for heading in headings:
        for row in rows_of(heading):
            if row[0] in (f"`{name}`", "all"):
                row = row[1:]
            if re.fullmatch(r"`[a-z_]+`", row[0]):
                defaults[row[0].strip("`")] = row[1].strip("`")
    return defaults


def shown(parameter):
    if parameter.default is parameter.empty:
        return "required"
    if isinstance(parameter.default, str):
        return f'"{parameter.default}"'
    return {ms.float16: "float16", ms.float32: "float32"}.get(parameter.default, str(parameter.default))


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_has_the_arguments_of_the_signature(name):
    parameters = inspect.signature(getattr(ms_gradaccum, name).__init__).parameters
    refused = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {key: each for key, each in parameters.items() if each.kind not in refused and key != "self"}
    expected = {key: shown(each) for key, each in named.items()}
    for key in OF_TEXT.get(name, ()):
        assert f"`{key}" in PAGE
        del expected[key]
    assert listed(name) == expected
