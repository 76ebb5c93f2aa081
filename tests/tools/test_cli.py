"""``python -m ms_gradaccum``: pictures and facts."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from PIL import Image

import ms_gradaccum
from ms_gradaccum.__main__ import main, parse
from ms_gradaccum.tools import environment
from ms_gradaccum.tools.reporting.run_plot import draw, read_run


def run(*arguments, cwd=Path(__file__).parents[2]):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def write_run(path, updates, **items):
    """Write reports with these items, some of them functions of the update."""
    items = {"loss": lambda update: 1.0 / update, "grad_norm": 1.0, "learning_rate": 0.1, **items}
    reports = [{name: of(each) if callable(of) else of for name, of in items.items()} for each in updates]
    lines = [json.dumps({"update": each, **report}) for each, report in zip(updates, reports)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_picture_has_its_size_and_shows_the_run(tmp_path, capsys):
    run = write_run(tmp_path / "run.jsonl", range(1, 40), clipped_grad_norm=0.5, weight_norm=3.0)
    assert main(["plot", str(run)]) == 0
    output = tmp_path / "run.png"
    assert capsys.readouterr().out == f"{output}\n"
    assert Image.open(output).size == (1000, 400) and Image.open(output).format == "PNG"


def axes_of(monkeypatch, *runs):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw(runs, "unused.png")
    return {axes.get_ylabel(): axes for axes in figures[0].axes}


def test_the_curves_are_the_numbers_and_wide_ranges_are_logarithmic(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run.jsonl", range(1, 40), weight_norm=3.0, grad_norm=lambda update: 1 + update % 3)
    panels = axes_of(monkeypatch, run)
    # Neither the learning rate nor the norm of the weights changes.
    assert list(panels) == ["loss", "gradient norm"]
    (curve,) = panels["loss"].get_lines()
    np.testing.assert_allclose(curve.get_xydata(), [(update, 1 / update) for update in range(1, 40)])
    assert [axes.get_yscale() for axes in panels.values()] == ["log", "linear"]
    assert [axes.get_legend() for axes in panels.values()] == [None, None]


def test_of_two_equal_runs_both_are_seen_with_their_names(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / f"{name}.jsonl", range(1, 100)) for name in "ab"]
    loss = axes_of(monkeypatch, *runs)["loss"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [str(run) for run in runs]
    first, second = loss.get_lines()
    np.testing.assert_array_equal(first.get_ydata(), second.get_ydata())
    monkeypatch.undo()
    draw(runs, tmp_path / "both.png")
    pixels = np.asarray(Image.open(tmp_path / "both.png").convert("RGB")).reshape(-1, 3).tolist()
    # The colours of the lines.
    assert min(pixels.count([31, 119, 180]), pixels.count([255, 127, 14])) > 100


def test_a_resumed_run_has_its_last_report_on_each_update_and_nulls_are_gaps(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run.jsonl", [1, 2, 3], loss=lambda update: None if update == 1 else 5.0)
    first = path.read_text()
    rates = {"learning_rate": None, "learning_rate_min": 0.1, "learning_rate_max": lambda update: update / 10}
    second = write_run(path, [3, 4], loss=7.0, **rates).read_text()
    evaluation = '{"update": 4, "eval_mse": 1.0}\n'
    path.write_text(first + '{"update": 3, "lo\n' + second + evaluation)
    reports = read_run(path)
    assert [(report["update"], report["loss"]) for report in reports] == [(1, None), (2, 5.0), (3, 7.0), (4, 7.0)]
    panels = axes_of(monkeypatch, path)
    (loss,), (rate,) = panels["loss"].get_lines(), panels["learning rate"].get_lines()
    np.testing.assert_array_equal(loss.get_ydata(), [np.nan, 5.0, 7.0, 7.0])
    np.testing.assert_array_equal(rate.get_ydata(), [0.1, 0.1, 0.3, 0.4])


def test_a_list_of_rates_of_an_older_file_is_its_largest(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run.jsonl", [1, 2], learning_rate=[0.1, 0.2])
    path.write_text(path.read_text() + write_run(tmp_path / "more.jsonl", [3], learning_rate=0.1).read_text())
    (curve,) = axes_of(monkeypatch, path)["learning rate"].get_lines()
    assert list(curve.get_ydata()) == [0.2, 0.2, 0.1]


def test_errors_are_one_sentence_and_status_2(tmp_path, capsys, monkeypatch):
    missing, empty = tmp_path / "missing.jsonl", tmp_path / "empty.jsonl"
    empty.write_text('{"something": "else"}\n')
    run = write_run(tmp_path / "run.jsonl", [1])

    def assert_told(*arguments, why):
        assert main(["plot", *map(str, arguments)]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert output.err.startswith("python -m ms_gradaccum plot: ") and why in output.err

    assert_told(missing, why=f"No such file or directory: '{missing}'")
    assert_told(empty, why=f"There is no report in {empty}.")
    assert_told(run, "-o", missing / "a.png", why=f"No such file or directory: '{missing / 'a.png'}'")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_told(run, why="pip install matplotlib.")


@pytest.mark.parametrize("arguments", [[], ["plot"], ["draw"]])
def test_a_wrong_command_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m ms_gradaccum" in capsys.readouterr().err


def test_help_names_all_commands_and_each_has_an_example_that_it_takes(capsys):
    def help_of(*command):
        with pytest.raises(SystemExit) as raised:
            main([*command, "--help"])
        assert raised.value.code == 0
        return capsys.readouterr().out

    commands = ["test", "micro-size", "plot", "env"]
    assert re.findall(r"^    ([a-z-]+)(?= |$)", help_of(), re.M) == commands
    for command in commands:
        usage, example = help_of(command).split(f"\nexample:\n  python -m ms_gradaccum {command}")
        assert usage.startswith(f"usage: python -m ms_gradaccum {command} ")
        assert parse([command, *example.split()]).command == command


def test_the_version_does_not_wait_for_mindspore():
    program = (
        "import sys; from ms_gradaccum.__main__ import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as ended: print(ended.code, 'mindspore' in sys.modules)"
    )
    result = run("-c", program)
    assert result.stdout == f"ms_gradaccum {ms_gradaccum.__version__}\n0 False\n", result.stderr


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
from ms_gradaccum.__main__ import main

class Interrupt:
    def find_spec(name, path, target=None):
        if name == "mindspore.ops":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
sys.exit(main(["test"]))
"""


def test_ctrl_c_in_the_import_of_mindspore_is_one_sentence(tmp_path):
    ended = run("-c", SLOW_IMPORT, cwd=tmp_path)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.endswith("python -m ms_gradaccum test: it was interrupted, and its processes have ended.\n")
    assert list(tmp_path.iterdir()) == []


def test_env_says_what_a_bug_report_needs():
    result = run("-m", "ms_gradaccum", "env")
    assert result.returncode == 0, result.stderr
    facts = dict(re.findall(r"^(.+?)  +(.+)$", result.stdout, re.M))
    assert facts["device target"].startswith(ms.get_context("device_target"))
    wanted = {"mindspore": ms.__version__, "numpy": np.__version__, "python": platform.python_version()}
    wanted |= {"default mode": "PYNATIVE", "float16 products": "yes", "fast convolutions on CPU": "yes"}
    assert wanted.items() <= facts.items()


def test_env_says_what_fails_and_why(monkeypatch, tmp_path):
    def fail(dtype):
        raise RuntimeError("\n  the reason \nand a stack")

    monkeypatch.setattr(environment, "multiply", fail)
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    facts = environment.describe()
    assert facts["several processes"] == "no: msrun is not found"
    assert facts["float16 products"] == "no: the reason"
    assert facts["no-such-package"] == "not installed"
    # Beside its Python, in an environment that is not activated, it is found.
    (tmp_path / "msrun").touch(mode=0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment.describe()["several processes"] == "yes"
