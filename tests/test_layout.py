"""The shape of the package: short files and functions, imports that run one way."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ms_gradaccum"

# A file, or a folder, imports only from those before it. A batch goes down the list, from its split to its update.
ORDER = """
_checks step_output stock_cell events structure micro_batch loss_weight token_mean_loss loss_kind runs kernels
grad_buffer grad_clip compiled thread_pool convolutions optimizers loss_scale half_precision rewriting precision
grad_accumulation ambiguous_inputs bad_micro_batch parallel micro_loss micro_step micro_steps window_clip update
window train_step accumulation_config window_counter saved prepared given_grads trained_network loop_window
accumulator averages state state_checkpoint model_steps model planning plan verification verify probing
micro_size_finder step_costs step_report metric_sinks metrics_logger ema progress_display callbacks integrations
__init__ run_plot environment __main__
""".split()

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file):
    return file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imported_modules(file):
    """Full names of all that ``file`` imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}, line {node.lineno}: a relative import"
            yield node.module


def imported_files(file):
    """Names of the files of the package that ``file`` imports."""
    names = [name.partition(".")[2] or "__init__" for name in imported_modules(file) if is_ours(name)]
    return [f"{name}.__init__" if (PACKAGE / name.replace(".", "/")).is_dir() else name for name in names]


def is_ours(module):
    return module == "ms_gradaccum" or module.startswith("ms_gradaccum.")


def place(name):
    return ORDER.index(name.split(".")[0])


def code_length(function):
    """Lines of a function without its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - len((docstring or "").splitlines())


def test_there_is_something_to_check():
    assert len(FILES) > 10
    assert any(imported_files(file) for file in FILES)


def test_each_file_has_its_place_in_the_order():
    assert {name_of(file).split(".")[0] for file in FILES} == set(ORDER)


def lines_of_code(file):
    """Number of lines with code: docstrings, comments and blank lines do not count."""
    text, docstrings = file.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in NO_CODE} - docstrings)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_has_at_most_250_lines_of_code(file):
    assert lines_of_code(file) <= 250


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_function_has_at_most_40_lines(file):
    functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)]
    assert {f.name: code_length(f) for f in functions if code_length(f) > 40} == {}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_imports_only_from_those_before_it(file):
    name = name_of(file)
    for other in imported_files(file):
        same_folder = "." in name and name.split(".")[0] == other.split(".")[0]
        assert same_folder or place(other) < place(name), f"{name} imports {other}"


def test_there_is_no_import_cycle():
    imports = {name_of(file): set(imported_files(file)) for file in FILES}
    while imports:
        free = [name for name, others in imports.items() if not others & imports.keys()]
        assert free, f"a cycle among {sorted(imports)}"
        for name in free:
            del imports[name]


def test_the_page_for_maintainers_has_the_same_order():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| [\w ]+ \| (`[\w` ]+`) \|", page, re.M)
    assert re.findall(r"\w+", " ".join(rooms)) == ORDER


def test_nothing_imports_torch():
    for file in FILES:
        assert "torch" not in {module.split(".")[0] for module in imported_modules(file)}, file
