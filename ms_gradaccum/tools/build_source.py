"""The file of a function that builds a training, read without being run: a wrong name is told at once.

It imports nothing of MindSpore, which takes seconds.
"""

import ast
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# Functions with which a file can define names that its text does not have.
_DEFINES = ("globals", "vars", "setattr", "exec")


def check_build(owner: str, build: str) -> None:
    """Raise if the file, module or function of 'train.py:build' is not there, or an import at its top must fail."""
    place, _, name = build.rpartition(":")
    wrong = _mistake(place, name.partition(".")[0]) if place and name else None
    if wrong is not None:
        raise ValueError(
            f"For '{owner}', the argument 'build' must be a function that a new process can import, but got {build!r}, "
            f"{wrong[0]}. {wrong[1]}"
        )


def _mistake(place: str, name: str) -> tuple[str, str] | None:
    """Return what is wrong and what to do, or None."""
    importlib.invalidate_caches()
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            return "whose file is not there", f"It is looked for at {file}."
    else:
        spec = _find(place)
        if spec is None:
            return "whose module is not found", "Call the command in its folder, or add that to PYTHONPATH."
        file = Path(spec.origin or "")
        if file.suffix != ".py":
            return None
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return "whose file is no Python program", f"{file}, line {error.lineno}: {error.msg}."
    missing = _missing_import(tree, file.parent)
    if missing is not None:
        return f"whose file imports {missing}, which is not found", "Install it, or add its folder to PYTHONPATH."
    names = set(_names(tree))
    if names & {name, "*", "__getattr__"}:
        return None
    functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
    return "which its file does not have", f"{file} has {', '.join(functions) or 'no function'}."


def _find(module: str) -> ModuleSpec | None:
    """Find a module as `import` does, without importing the packages that it is in."""
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # An imported module that does not say where it comes from.
        return ModuleSpec(module, None)
    for part in others:
        inside = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(f"{first}.{part}", inside) if inside else None
    return spec


def _missing_import(tree: ast.Module, folder: Path) -> str | None:
    """Return a package that the first lines import and that is not there.

    It looks no further than the first line that can change where modules are looked for: anything but an import, or an
    import of a file beside this one.
    """
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Import):
            modules = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules = [statement.module]
        else:
            break
        for package in (module.partition(".")[0] for module in modules):
            if PathFinder.find_spec(package, [str(folder)]):
                return None
            if _find(package) is None:
                return package
    return None


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines outside functions and classes, and ``*`` if it can define others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
            continue
        if isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif isinstance(child, ast.Name):
            if isinstance(child.ctx, ast.Store):
                yield child.id
            elif child.id in _DEFINES:
                yield "*"
        yield from _names(child)
