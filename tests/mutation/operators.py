"""Mutants of a source file: each is the file's syntax tree with one small change in the body of a function.

Changed are statements (calls, awaits, assignments to attributes and items, raise: left out), conditions
(negated), comparisons, boolean operators, sums, constants and return values. Left alone is what no test
should have to notice: logging and the timeline's notes, assertions, annotations, protocols.
"""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_DIAGNOSTICS = {"log", "_log", "speak", "note"}
"""Names in calls that only tell people something."""
_IDENTIFIER = re.compile(r"[A-Za-z][\w./-]*")
"""Strings that mean something to a program; sentences are for people."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: by an operator, of the node with a number in the order of ast.walk, in a function."""

    path: Path
    function: str
    """The function's qualified name."""
    first_line: int
    """Where the function begins, as its code object has it."""
    line: int
    node: int
    operator: str
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line} {self.function}: {self.operator}\n  - {self.before}\n  + {self.after}"
        )


def mutants(path: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    found = []
    for name, function in _functions(ast.parse(path.read_text())):
        left_alone = _left_alone(function)
        statements = _statements(function)
        for number, node in enumerate(ast.walk(function)):
            if id(node) in left_alone:
                continue
            for operator, change in OPERATORS.items():
                if (changed := change(node)) is None:
                    continue
                statement = statements[id(node)]
                before, after = _head(statement), _head(_replaced(statement, node, changed))
                if before != after:
                    line = getattr(node, "lineno", statement.lineno)
                    found.append(
                        Mutant(path, name, _first_line(function), line, number, operator, before, after)
                    )
    return found


def mutated_code(mutant: Mutant) -> CodeType:
    """Return the code of a mutant's function, with the change."""
    tree = ast.parse(mutant.path.read_text())
    function = next(
        function
        for name, function in _functions(tree)
        if (name, _first_line(function)) == (mutant.function, mutant.first_line)
    )
    node = list(ast.walk(function))[mutant.node]
    changed = OPERATORS[mutant.operator](node)
    assert changed is not None
    _Replace(node, changed).visit(function)
    whole = compile(ast.fix_missing_locations(tree), str(mutant.path), "exec", dont_inherit=True)
    return next(
        code
        for code in codes(whole)
        if (code.co_qualname, code.co_firstlineno) == (mutant.function, mutant.first_line)
    )


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that are inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


# The operators


def _deleted(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Raise):
        return ast.Pass()
    if isinstance(node, ast.Expr):
        inner = node.value.value if isinstance(node.value, ast.Await) else node.value
        return ast.Pass() if isinstance(inner, ast.Call) else None
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        # Without a local variable its next use fails, which any test notices.
        return ast.Pass() if any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets) else None
    return ast.Pass() if isinstance(node, ast.Delete) else None


def _negated(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.If | ast.While | ast.IfExp):
        return None
    # A loop without end ends by being cancelled.
    if isinstance(node.test, ast.Constant):
        return None
    return _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def _compared(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare):
        return None
    return _with(node, ops=[_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])


def _other_operator(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        return _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def _other_constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant):
        return None
    if isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node.value, int | float):
        return ast.Constant(node.value + 1)
    if isinstance(node.value, str) and _IDENTIFIER.fullmatch(node.value):
        return ast.Constant(f"{node.value}Mutated")
    return None


def _no_result(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Return) or node.value is None or isinstance(node.value, ast.Constant):
        return None
    return ast.Return(ast.Constant(None))


def _other_jump(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Break):
        return ast.Continue()
    return ast.Break() if isinstance(node, ast.Continue) else None


OPERATORS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "statement left out": _deleted,
    "condition negated": _negated,
    "comparison changed": _compared,
    "operator changed": _other_operator,
    "constant changed": _other_constant,
    "nothing returned": _no_result,
    "jump changed": _other_jump,
}


# The tree


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._old:
            return ast.copy_location(self._new, node)
        result: ast.AST = self.generic_visit(node)
        return result


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replaced(statement: ast.stmt, node: ast.AST, changed: ast.AST) -> ast.AST:
    """Return a copy of a statement in which a node is replaced."""
    number = next(i for i, one in enumerate(ast.walk(statement)) if one is node)
    duplicate = copy.deepcopy(statement)
    return ast.fix_missing_locations(
        _Replace(list(ast.walk(duplicate))[number], copy.deepcopy(changed)).visit(duplicate)
    )


def _head(statement: ast.AST) -> str:
    return ast.unparse(statement).partition("\n")[0]


def _first_line(function: Function) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions of a module and its classes, not those inside them, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in child.bases):
                yield from _functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _functions(child, prefix)


def _statements(function: Function) -> dict[int, ast.stmt]:
    """Return the innermost statement around each node of a function, by the node's id."""
    found: dict[int, ast.stmt] = {}

    def visit(node: ast.AST, around: ast.stmt) -> None:
        around = node if isinstance(node, ast.stmt) else around
        found[id(node)] = around
        for child in ast.iter_child_nodes(node):
            visit(child, around)

    visit(function, function)
    return found


def _left_alone(function: Function) -> set[int]:
    """Return the ids of the nodes that must not change."""
    found: set[int] = set()
    roots: list[ast.AST] = [function.args, *function.decorator_list]
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.arguments | ast.JoinedStr) or _is_diagnostic(node):
            roots.append(node)
        if isinstance(node, ast.AnnAssign):
            roots.append(node.annotation)
        if isinstance(node, Function) and node.returns is not None:
            roots.append(node.returns)
        if function.name == "__init__" and isinstance(node, ast.Assign | ast.AnnAssign):
            # Without an attribute its next use fails, which any test notices.
            found.add(id(node))
        if isinstance(node, ast.Raise):
            # That it is raised matters; its message is for people.
            roots += [node.exc] if node.exc is not None else []
    for root in roots:
        found |= {id(node) for node in ast.walk(root)}
    return found


def _is_diagnostic(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    names = {
        n.id if isinstance(n, ast.Name) else n.attr
        for n in ast.walk(node.value.func)
        if isinstance(n, ast.Name | ast.Attribute)
    }
    return bool(names & _DIAGNOSTICS)
