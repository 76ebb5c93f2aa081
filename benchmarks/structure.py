"""Figures of the package's structure: its files, lines and floors of imports.

`./run.sh bench structure` prints these figures, which `docs/architecture.md` shows.
"""

import argparse
import ast
import io
import os
import sys
import tokenize
from functools import cache
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from package_files import FILES, PACKAGE, counts_of, files_in, imported_files, name_of, seen  # noqa: E402

STEP_ROOMS = ("backend", "batch", "gradients", "parallel", "training")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(file: Path) -> int:
    """Return the number of lines with code: docstrings, comments and blank lines do not count."""
    text, docstrings = file.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in _NO_CODE} - docstrings)


def _lines(files: list[Path]) -> str:
    return f"{sum(file.read_text().count(chr(10)) for file in files):,} / {sum(map(lines_of_code, files)):,}"


def floors(imports: dict[str, list[str]]) -> dict[str, int]:
    """Return how many files stand above one another, up to each file."""

    @cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, imports[name]), default=0)

    return {name: floor(name) for name in imports}


def loaded_with(name: str, imports: dict[str, list[str]]) -> set[str]:
    """Return the files that have to be read to understand what ``name`` imports, itself among them."""
    found, open_names = set(), [name]
    while open_names:
        if (each := open_names.pop()) not in found:
            found.add(each)
            open_names += imports[each]
    return found


def way_of_a_batch() -> tuple[str, str]:
    """Return the files that one batch goes through, and what one of 4 micro batches does later on the host.

    The first are those on the host while its loss is measured, with those inside graphs, and with building. The second
    are the files, the functions, the calls and the changes of file.
    """
    import mindspore as ms
    from mindspore import nn, ops

    from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TrainOneStepCell

    def windows(mode: int, micro_size: int = 2, check_loss: bool = True) -> tuple[list[tuple[str, str]], ...]:
        ms.set_context(mode=mode)
        network = nn.Dense(4, 1)
        loss = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size)
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        with seen() as building:
            step = TrainOneStepCell(loss, optimizer, clip=ClipByGlobalNorm(1.0), check_loss=check_loss)
        batch = ops.ones((4, 4)), ops.ones((4, 1))
        for _ in range(1 if check_loss else 5):
            step(*batch)
        with seen() as running:
            step(*batch)
        return building, running

    _, later = windows(ms.GRAPH_MODE, 4, check_loss=False)
    built, on_the_host = map(files_in, windows(ms.GRAPH_MODE))
    # Op by op, Python goes through what is inside a graph otherwise.
    with mock.patch.dict(os.environ, MS_JIT="0"):
        built_too, in_graphs = map(files_in, windows(ms.PYNATIVE_MODE))
    running = on_the_host | in_graphs
    whole = running | built | built_too
    return f"{len(on_the_host)} / {len(running)} / {len(whole)}", " / ".join(map(str, counts_of(later)))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    imports = {name_of(file): imported_files(file) for file in FILES}
    heights = floors(imports)
    model = loaded_with("loops.model", imports)
    step = [file for file in FILES if file.relative_to(PACKAGE).parts[0] in STEP_ROOMS]
    measured, later = way_of_a_batch()
    figures = {
        "entries of the package": f"{len({file.relative_to(PACKAGE).parts[0] for file in FILES})}",
        "files": f"{len(FILES)}",
        "lines, docstrings included / of code": _lines(FILES),
        "of these in the rooms of a step": _lines(step),
        "files to load Model": f"{len(model)}",
        "files of one batch: host / with graphs / with building": measured,
        "a later one: files / functions / calls / changes of file": later,
        "floors of imports: up to Model / in all": f"{heights['loops.model']} / {max(heights.values())}",
    }
    for name, value in figures.items():
        print(f"{name:<60}{value:>20}")


if __name__ == "__main__":
    main()
