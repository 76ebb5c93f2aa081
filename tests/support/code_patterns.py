"""Find code by its form and replace it: a name in capitals stands for any expression.

``X.all_reduce(Y)`` is found in ``return self.all_reduce( values )``, and ``Y`` in what replaces it is then ``values``.
So neither the names of locals nor line breaks and comments matter. Capitals that the pattern lacks stay as they are.
"""

import ast
import copy
from dataclasses import dataclass, field


def replaced(source: str, function: str, old: str, new: str) -> str:
    """Return a source in which the code ``old``, which ``function`` (or ``Class.method``) has once, is ``new``.

    Both are an expression, or statements that follow one another, of which ``new`` may have none.
    """
    tree = ast.parse(source)
    place = _named(tree, function)
    is_expression = _is_expression(old) and _is_expression(new)
    change = _OfExpressions(old, new) if is_expression else _OfStatements(old, new)
    change.visit(place)
    if change.times != 1:
        raise ValueError(f"{function} has {change.times} times {old!r}, not once")
    return ast.unparse(tree)


def _named(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == part]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} definitions of {name}, not one")
        tree = found[0]
    return tree


def _is_expression(text: str) -> bool:
    body = ast.parse(text).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


@dataclass
class _Change(ast.NodeTransformer):
    old: str
    new: str
    times: int = field(default=0, init=False)


class _OfExpressions(_Change):
    def visit(self, node: ast.AST) -> ast.AST:
        bound: dict[str, ast.expr] = {}
        if isinstance(node, ast.expr) and _has_form(ast.parse(self.old, mode="eval").body, node, bound):
            self.times += 1
            return _Filled(bound).visit(ast.parse(self.new, mode="eval").body)
        return self.generic_visit(node)


class _OfStatements(_Change):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, [])
            if isinstance(statements, list):
                self._replace(statements)
        return super().generic_visit(node)

    def _replace(self, statements: list[ast.stmt]) -> None:
        pattern = ast.parse(self.old).body
        for begin in range(len(statements)):
            bound: dict[str, ast.expr] = {}
            found = slice(begin, begin + len(pattern))
            if not _has_form(pattern, statements[found], bound):
                continue
            self.times += 1
            statements[found] = [_Filled(bound).visit(statement) for statement in ast.parse(self.new).body]
            # What is empty now would be no code.
            statements[:] = statements or [ast.Pass()]
            return


class _Filled(ast.NodeTransformer):
    """Puts what was found in place of the capitals."""

    def __init__(self, bound: dict[str, ast.expr]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.bound:
            return node
        value = copy.deepcopy(self.bound[node.id])
        # It may have been read, and be assigned here, or the other way round.
        if hasattr(value, "ctx"):
            value.ctx = node.ctx
        return value


def _has_form(pattern: object, code: object, bound: dict[str, ast.expr]) -> bool:
    """Return whether code has a form, and keep what the capitals stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper() and isinstance(code, ast.expr):
        return ast.unparse(bound.setdefault(pattern.id, code)) == ast.unparse(code)
    if type(pattern) is not type(code):
        return False
    if isinstance(pattern, ast.expr_context):
        return True
    if isinstance(pattern, ast.AST):
        parts = [(value, getattr(code, name)) for name, value in ast.iter_fields(pattern)]
        return all(_has_form(part, own, bound) for part, own in parts)
    if isinstance(pattern, list):
        return len(pattern) == len(code) and all(_has_form(part, own, bound) for part, own in zip(pattern, code))
    return pattern == code
