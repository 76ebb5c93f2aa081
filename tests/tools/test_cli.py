"""``python -m ms_gradaccum``: pictures and facts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from PIL import Image

from ms_gradaccum.__main__ import main, parse
from ms_gradaccum.tools import environment
from ms_gradaccum.tools.builder import Builder, check_build
from ms_gradaccum.tools.reporting.run_plot import draw, read_run


def write_run(path, updates, loss=lambda update: 1.0 / update, **items):
    lines = []
    for update in updates:
        numbers = {"update": update, "loss": loss(update), "grad_norm": 1.0, "learning_rate": 0.1, **items}
        lines.append(json.dumps(numbers))
    path.write_text("\n".join(lines) + "\n")
    return path


def ink(file):
    """The share of pixels that are not white."""
    return np.mean(np.any(np.asarray(Image.open(file).convert("RGB")) != 255, axis=-1))


def test_a_picture_has_its_size_and_shows_the_run(tmp_path, capsys):
    run = write_run(tmp_path / "run.jsonl", range(1, 40), clipped_grad_norm=0.5, weight_norm=3.0)
    assert main(["plot", str(run)]) == 0
    output = tmp_path / "run.png"
    assert capsys.readouterr().out == f"{output}\n"
    assert Image.open(output).size == (1000, 400) and Image.open(output).format == "PNG"
    # The curves, and not only their axes: another run looks different.
    assert 0.01 < ink(output) < 0.5
    other = write_run(tmp_path / "other.jsonl", range(1, 40), loss=lambda update: update)
    draw([other], tmp_path / "other.png")
    assert (tmp_path / "other.png").read_bytes() != output.read_bytes()


def axes_of(monkeypatch, *runs):
    """The panels of a picture, by their titles."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw(runs, "unused.png")
    return {axes.get_ylabel(): axes for axes in figures[0].axes}


def rewrite(path, **changes):
    """Change items of each report, by functions of its update."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**each, **{name: of(each["update"]) for name, of in changes.items()}} for each in records]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_the_curves_are_the_numbers_and_wide_ranges_are_logarithmic(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run.jsonl", range(1, 40), weight_norm=3.0)
    rewrite(run, grad_norm=lambda update: 1 + update % 3, clipped_grad_norm=lambda update: min(2, 1 + update % 3))
    panels = axes_of(monkeypatch, run)
    # Neither the learning rate nor the norm of the weights changes.
    assert list(panels) == ["loss", "gradient norm"]
    (curve,) = panels["loss"].get_lines()
    np.testing.assert_allclose(curve.get_xydata(), [(update, 1 / update) for update in range(1, 40)])
    assert [axes.get_yscale() for axes in panels.values()] == ["log", "linear"]
    norm = panels["gradient norm"]
    assert [text.get_text() for text in norm.get_legend().get_texts()] == ["before clipping", "after clipping"]
    before, after = norm.get_lines()
    assert (max(before.get_ydata()), max(after.get_ydata())) == (3, 2)
    # Both are seen where they coincide.
    assert before.get_linewidth() > 2 * after.get_linewidth() and before.get_alpha() < 0.5


def test_a_norm_that_is_never_clipped_is_one_curve_and_what_varies_has_a_panel(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run.jsonl", range(1, 40))
    changes = dict.fromkeys(("grad_norm", "clipped_grad_norm", "weight_norm", "learning_rate"), float)
    panels = axes_of(monkeypatch, rewrite(run, **changes))
    assert list(panels) == ["loss", "learning rate", "gradient norm", "weight norm"]
    for axes in panels.values():
        assert len(axes.get_lines()) == 1 and axes.get_legend() is None


def test_several_runs_are_in_one_picture_with_their_names(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / f"{name}.jsonl", range(1, 4)) for name in "ab"]
    loss = axes_of(monkeypatch, *runs)["loss"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [str(run) for run in runs]
    assert len({curve.get_color() for curve in loss.get_lines()}) == 2


def test_an_item_that_a_run_does_not_have_has_no_name_beside_the_curves(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / f"{name}.jsonl", range(1, 4)) for name in "ab"]
    rewrite(runs[0], weight_norm=float, grad_norm=float, clipped_grad_norm=lambda update: 0.5)
    rewrite(runs[1], weight_norm=lambda update: None, clipped_grad_norm=lambda update: None)
    panels = axes_of(monkeypatch, *runs)
    for panel, names in (("weight norm", [""]), ("gradient norm", [", before clipping", ", after clipping"])):
        shown = [text.get_text() for text in panels[panel].get_legend().get_texts()]
        others = [f"{runs[1]}, before clipping"] if len(names) > 1 else []
        assert shown == [f"{runs[0]}{name}" for name in names] + others


def test_a_resumed_run_has_its_last_report_on_each_update_and_nulls_are_gaps(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run.jsonl", [1, 2, 3], loss=lambda update: None if update == 1 else 5.0)
    first = path.read_text()
    write_run(path, [3, 4], loss=lambda update: 7.0, learning_rate=None, learning_rate_min=0.1)
    second = rewrite(path, learning_rate_max=lambda update: update / 10).read_text()
    evaluation = '{"update": 4, "eval_mse": 1.0}\n'
    path.write_text(first + '{"update": 3, "lo\n' + second + evaluation)
    reports = read_run(path)
    assert [(report["update"], report["loss"]) for report in reports] == [(1, None), (2, 5.0), (3, 7.0), (4, 7.0)]
    panels = axes_of(monkeypatch, path)
    loss, rate = panels["loss"], panels["learning rate"]
    np.testing.assert_array_equal(loss.get_lines()[0].get_ydata(), [np.nan, 5.0, 7.0, 7.0])
    nan = np.nan
    curves = [[0.1, 0.1, nan, nan], [nan, nan, 0.1, 0.1], [nan, nan, 0.3, 0.4]]
    np.testing.assert_array_equal([curve.get_ydata() for curve in rate.get_lines()], curves)
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ["smallest", "largest"]


def test_a_list_of_rates_of_an_older_file_is_its_largest(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run.jsonl", [1, 2], learning_rate=[0.1, 0.2])
    path.write_text(path.read_text() + write_run(tmp_path / "more.jsonl", [3], learning_rate=0.1).read_text())
    (curve,) = axes_of(monkeypatch, path)["learning rate"].get_lines()
    assert list(curve.get_ydata()) == [0.2, 0.2, 0.1]


def test_errors_are_one_sentence_and_status_2(tmp_path, capsys, monkeypatch):
    missing, empty = tmp_path / "missing.jsonl", tmp_path / "empty.jsonl"
    empty.write_text('{"something": "else"}\n')
    run = write_run(tmp_path / "run.jsonl", [1])
    for arguments, sentence in [
        ([missing], f"[Errno 2] No such file or directory: '{missing}'"),
        ([empty], f"There is no report in {empty}. Give a file that MetricsLogger has written."),
        ([run, "-o", missing / "a.png"], f"[Errno 2] No such file or directory: '{missing / 'a.png'}'"),
    ]:
        assert main(["plot", *map(str, arguments)]) == 2
        output = capsys.readouterr()
        assert output.err == f"python -m ms_gradaccum plot: {sentence}\n" and output.out == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(run)]) == 2
    assert capsys.readouterr().err == (
        "python -m ms_gradaccum plot: Drawing takes the package matplotlib, but got: import of matplotlib.figure "
        "halted; None in sys.modules. Install it with: pip install 'ms_gradaccum[plot]'.\n"
    )


@pytest.mark.parametrize("arguments", [[], ["plot"], ["draw"]])
def test_a_wrong_command_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m ms_gradaccum" in capsys.readouterr().err


GOOD = "import numpy as np\n\n\ndef build():\n    return np\n"


@pytest.mark.parametrize(
    "build, got",
    [
        ("nofile.py:build", "whose file is not there. It is looked for at {folder}/nofile.py."),
        ("nosuch:build", "whose module is not found. "),
        ("nosuch.part:build", "whose module is not found. "),
    ],
)
def test_a_build_that_is_not_there_starts_nothing(build, got, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["micro-size", build, "--memory-limit", "4GiB"]) == 2
    output = capsys.readouterr()
    rule = "For 'find_micro_size', the argument 'build' must be a function that a new process can import"
    rule += f", but got '{build}', "
    assert output.err.startswith(f"python -m ms_gradaccum micro-size: {rule}{got.format(folder=tmp_path)}")
    assert output.err.count("\n") == 1 and output.out == ""


def test_a_build_that_is_there_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import nosuch\n")
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "__init__.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for build in (
        "train.py:build",
        "train.py:build.inner",
        "train:build",
        "apart.part:build",
        "__main__:build",
        "none",
    ):
        check_build("find_micro_size", build)
    assert not {"train", "apart"} & sys.modules.keys()


def test_a_missing_import_is_named_when_the_file_is_imported(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(f"{GOOD}\n\ndef later():\n    pass\n\n\nfrom nosuch.part import x\n")
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    place = f"{tmp_path}/train.py:build"
    got = f"got '{place}', whose file imports nosuch, which is not found. Install it, or add its folder to PYTHONPATH."
    with pytest.raises(ValueError, match=re.escape(got)):
        Builder.of("find_micro_size", place).call()
    sys.modules.pop("__mp_main__")


@pytest.mark.parametrize(
    "command, arguments",
    [
        ("test", ["--device", "--workers N", "--timeout SECONDS", "--output FILE"]),
        ("micro-size", ["train.py:build", "--memory-limit SIZE", "--timeout SECONDS"]),
        ("plot", ["run.jsonl", "-o"]),
        ("env", []),
    ],
)
def test_help_has_each_argument_its_default_and_an_example(command, arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert raised.value.code == 0 and text.startswith(f"usage: python -m ms_gradaccum {command} ")
    # An argument and its help, which may be on several lines.
    entries = [" ".join(entry.split("\n\n")[0].split()) for entry in re.split(r"\n  (?=\S)", text)]
    said = {argument: next(entry for entry in entries if entry.startswith(argument)) for argument in arguments}
    for argument, entry in said.items():
        assert re.search("required$|default: .+$" if argument[0] == "-" else "function that|files that", entry), entry
    # The defaults are those that it takes, and it takes its own example.
    needed = {"micro-size": ["a:b", "--memory-limit", "1"], "plot": ["a"]}
    for name, value in vars(parse([command, *needed.get(command, [])])).items():
        entry = next((entry for argument, entry in said.items() if argument.startswith(f"--{name}")), "")
        if entry and isinstance(value, int | float | str) and not isinstance(value, bool):
            assert f"default: {value:g}" in entry if not isinstance(value, str) else f"default: {value}" in entry
    example = text.split(f"\nexample:\n  python -m ms_gradaccum {command}")[1]
    assert parse([command, *example.split()]).command == command


def test_help_names_all_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^    ([a-z-]+)(?= |$)", text, re.M) == ["test", "micro-size", "plot", "env"]
    assert "python -m ms_gradaccum COMMAND --help has the arguments of a command" in text


def test_wrong_arguments_do_not_wait_for_mindspore():
    program = (
        "import sys; from ms_gradaccum.__main__ import main; print(main(sys.argv[1:]), 'mindspore' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "micro-size", "nofile.py:build", "--memory-limit", "1GiB"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert result.stdout == "2 False\n", result.stderr


@pytest.mark.parametrize(
    "arguments, function",
    [
        (["micro-size", "numpy:array", "--memory-limit", "1GiB"], "micro_size_finder.find_micro_size"),
        (["test"], "self_test.self_test.self_test"),
        (["plot", "run.jsonl"], "reporting.run_plot.draw"),
        (["env"], "environment.describe"),
    ],
)
def test_ctrl_c_is_one_sentence_and_status_130(arguments, function, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ms_gradaccum.tools.{function}", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 130
    sentence = f"python -m ms_gradaccum {arguments[0]}: it was interrupted, and its processes have ended.\n"
    assert capsys.readouterr().err.endswith(sentence) and list(tmp_path.iterdir()) == []


SLOW_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder
from ms_gradaccum.__main__ import main


class Interrupt(MetaPathFinder):
    \"\"\"Ctrl-C while MindSpore is imported.\"\"\"

    def find_spec(self, name, path, target=None):
        if name == "mindspore.ops":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupt())
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_in_the_import_of_mindspore_is_one_sentence(tmp_path):
    command = [sys.executable, "-c", SLOW_IMPORT, "test"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.endswith("python -m ms_gradaccum test: it was interrupted, and its processes have ended.\n")
    assert list(tmp_path.iterdir()) == []


def test_env_says_what_a_bug_report_needs():
    command = [sys.executable, "-m", "ms_gradaccum", "env"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    facts = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["mindspore"] == ms.__version__ and facts["numpy"] == np.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["device target"].startswith(ms.get_context("device_target"))
    assert facts["default mode"] == "PYNATIVE"
    assert facts["float16 products"] == "yes"
    assert facts["fast convolutions on CPU"] == "yes"


def test_env_says_what_fails_and_why(monkeypatch):
    def fail(dtype):
        raise RuntimeError("\n  the reason \nand a stack")

    monkeypatch.setattr(environment, "multiply", fail)
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    facts = environment.describe()
    assert facts["several processes"] == "no: msrun is not found"
    assert facts["float16 products"] == "no: the reason"
    assert facts["no-such-package"] == "not installed"
