"""Variables that a body captures: replay finds in them what forward found.

Python looks a captured variable up when the code runs. ``lambda t: layer(t)``, made in a loop over layers, would run
the last layer for each of them in a replay after the loop, and compute numbers without an error. So forward notes what
the variables of the body's function hold, and of the functions among its arguments, and where that has changed replay
runs a copy of the function with variables of its own.

Variables that hold tensors are left alone: ``externals.py`` knows whether replay reads them, and noting them would keep
memory. So are those that code of the body assigns, or that were assigned while it ran.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from torch_remat.runtime.tree import Static, unflatten

__all__ = ["CapturedByCall", "bound", "captured_by_call", "looked_up"]

_MISSING = object()
_DEPTH = 4  # functions in the variables of functions
_FUNC = object()  # the function of a partial or a method
_STORES = frozenset(("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL"))
_SIMPLE = (bool, int, float, complex, str, bytes)
_FUNCTIONS = frozenset((types.FunctionType, types.MethodType, functools.partial, Static))


class Captured(NamedTuple):
    """What variables held: closure cells by index, globals by name; and the same of functions inside.

    ``inner`` are functions in the cells; ``given`` those that are defaults, or that a partial, a method or a container
    holds.
    """

    cells: dict[int, Any]
    globals: dict[str, Any]
    inner: dict[int, Captured]
    given: dict[Any, Captured]

    def without(self, later: Captured | None) -> Captured | None:
        """Those that still hold the same in ``later``."""
        if later is None:
            return None
        cells = {key: value for key, value in self.cells.items() if _same(value, later.cells[key])}
        return Captured(
            cells,
            {key: value for key, value in self.globals.items() if _same(value, later.globals[key])},
            _without({key: one for key, one in self.inner.items() if key in cells}, later.inner),
            _without(self.given, later.given),
        )


def _without(before: dict[Any, Captured], later: dict[Any, Captured]) -> dict[Any, Captured]:
    kept = {key: one.without(later.get(key)) for key, one in before.items()}
    return {key: one for key, one in kept.items() if one is not None}


class CapturedByCall(NamedTuple):
    """What was captured by the function of one call and by the functions among its arguments, by leaf."""

    function: Captured | None
    arguments: dict[int, Captured]

    def without(self, later: CapturedByCall | None) -> CapturedByCall | None:
        """Those that still hold the same in ``later``."""
        if later is None:
            return None
        function = None if self.function is None else self.function.without(later.function)
        return CapturedByCall(function, _without(self.arguments, later.arguments))


def captured_by_call(function: Callable[..., Any], leaves: list[Any]) -> CapturedByCall | None:
    """What the variables hold that a call of ``function`` looks up; ``leaves`` are those of its arguments."""
    own = captured(function)
    arguments = _captured_in(enumerate(leaves), _DEPTH)
    return None if own is None and not arguments else CapturedByCall(own, arguments)


def captured(function: Any, depth: int = _DEPTH) -> Captured | None:
    """What the variables hold that ``function`` looks up outside of itself; None where it has none."""
    if depth == 0:
        return None
    given = _captured_in(_given(function), depth)
    if type(function) is not types.FunctionType:
        return Captured({}, {}, {}, given) if given else None
    cells, names = _variables(function)
    if not (cells or names or given):
        return None
    return Captured(cells, names, _captured_in(cells.items(), depth - 1), given)


def _variables(function: types.FunctionType) -> tuple[dict[int, Any], dict[str, Any]]:
    """The contents of its cells and globals."""
    indices, names = looked_up(function.__code__)
    space = function.__globals__
    cells = {index: _content(function, index) for index in indices}
    return cells, {name: _noted(space.get(name, _MISSING)) for name in names}


def _captured_in(values: Iterable[tuple[Any, Any]], depth: int) -> dict[Any, Captured]:
    functions = [(key, value) for key, value in values if type(value) in _FUNCTIONS]
    found = [(key, captured(value, depth)) for key, value in functions]
    return {key: one for key, one in found if one is not None}


def _given(function: Any) -> Iterable[tuple[Any, Any]]:
    """What was given to ``function`` when it was made: defaults, or all that a partial, a method, a container holds."""
    if type(function) is types.FunctionType:
        if function.__defaults__ is None and function.__kwdefaults__ is None:
            return ()
        return itertools.chain(enumerate(function.__defaults__ or ()), (function.__kwdefaults__ or {}).items())
    if isinstance(function, functools.partial):
        return itertools.chain([(_FUNC, function.func)], enumerate(function.args), function.keywords.items())
    if type(function) is types.MethodType:
        return [(_FUNC, function.__func__)]
    return enumerate(function.leaves) if type(function) is Static else ()


def bound(function: Any, then: Captured) -> Any:
    """``function``, or a copy of it whose variables hold what they held then, where some hold something else now."""
    if then.given:
        before = dict(_given(function))
        given = {key: bound(before[key], one) for key, one in then.given.items()}
        function = _with_given(function, {key: one for key, one in given.items() if one is not before[key]})
    if not (then.cells or then.globals):
        return function
    cells_now, names_now = _variables(function)
    cells = {index: value for index, value in then.cells.items() if not _same(value, cells_now[index])}
    names = {name: value for name, value in then.globals.items() if not _same(value, names_now[name])}
    cells = {index: value for index, value in cells.items() if not (value is _MISSING or value is Tensor)}
    names = {name: value for name, value in names.items() if not (value is _MISSING or value is Tensor)}
    for index, inner in then.inner.items():
        held = then.cells[index]
        copied = bound(held, inner)
        if copied is not held:
            cells[index] = copied
    return _copy(function, cells, names) if cells or names else function


def _with_given(function: Any, given: dict[Any, Any]) -> Any:
    if not given:
        return function
    if type(function) is types.MethodType:
        return types.MethodType(given[_FUNC], function.__self__)
    if type(function) is Static:
        leaves = [given.get(index, leaf) for index, leaf in enumerate(function.leaves)]
        return Static(unflatten(function.spec, leaves), function.spec, leaves)
    if isinstance(function, functools.partial):
        args = [given.get(index, one) for index, one in enumerate(function.args)]
        keywords = {name: given.get(name, one) for name, one in function.keywords.items()}
        return functools.partial(given.get(_FUNC, function.func), *args, **keywords)
    made = _copy(function, {}, {})
    defaults, keywords = function.__defaults__, function.__kwdefaults__
    made.__defaults__ = defaults and tuple([given.get(index, one) for index, one in enumerate(defaults)])
    made.__kwdefaults__ = keywords and {name: given.get(name, one) for name, one in keywords.items()}
    return made


class _Namespace(dict[str, Any]):
    """The globals of a function, of which some are bound to something else for it alone."""

    def __init__(self, real: dict[str, Any], names: dict[str, Any]) -> None:
        # What the interpreter takes from the dict itself when a function is made.
        super().__init__({name: real[name] for name in ("__builtins__", "__name__") if name in real})
        self._real = real
        self._names = names

    def __getitem__(self, name: str) -> Any:
        """As any global is looked up."""
        names = self._names if name in self._names else self._real
        return names[name]


def _copy(function: types.FunctionType, cells: dict[int, Any], names: dict[str, Any]) -> types.FunctionType:
    closure = [
        types.CellType(cells[index]) if index in cells else cell
        for index, cell in enumerate(function.__closure__ or ())
    ]
    space = _Namespace(function.__globals__, names) if names else function.__globals__
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, tuple(closure))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(before, _SIMPLE) and before == now)


def _content(function: types.FunctionType, index: int) -> Any:
    try:
        return _noted((function.__closure__ or ())[index].cell_contents)
    except ValueError:  # empty: not assigned yet, or deleted
        return _MISSING


def _noted(value: Any) -> Any:
    return Tensor if isinstance(value, Tensor) else value


@functools.lru_cache(maxsize=4096)
def looked_up(code: types.CodeType) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The cells and globals that ``code`` reads and that nothing in it assigns.

    No globals where it assigns one: it would do so in the copy of the namespace.
    """
    operations = [operation for inner in _with_nested(code) for operation in _operations(inner)]
    stores = {name for operation, name in operations if operation in _STORES}
    reads = {name for operation, name in operations if operation == "LOAD_GLOBAL"}
    cells = tuple([index for index, name in enumerate(code.co_freevars) if name not in stores])
    assigns_globals = any(operation in ("STORE_GLOBAL", "DELETE_GLOBAL") for operation, _ in operations)
    return cells, () if assigns_globals else tuple(sorted(reads))


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)


def _operations(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
