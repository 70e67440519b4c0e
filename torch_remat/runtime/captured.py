"""Variables that a body captures: replay finds in them what forward found.

Python looks a captured variable up when the code runs. ``lambda t: layer(t)``, made in a loop over layers, would run
the last layer for each of them in a replay after the loop, and compute numbers without an error. So forward notes what
the variables of the body's function hold, and where that has changed replay runs a copy of the function with variables
of its own.

Variables that hold tensors are left alone: ``externals.py`` knows whether replay reads them, and noting them would keep
memory. So are those that code of the body assigns, or that were assigned while it ran.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Captured", "bound", "captured"]

_MISSING = object()
_DEPTH = 4  # functions in the variables of functions
_STORES = frozenset(("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL"))
_SIMPLE = (bool, int, float, complex, str, bytes)


class Captured(NamedTuple):
    """What variables held: closure cells by index, globals by name; and the same of functions in the cells."""

    cells: dict[int, Any]
    globals: dict[str, Any]
    inner: dict[int, Captured]

    def without(self, later: Captured | None) -> Captured | None:
        """Those that still hold the same in ``later``."""
        if later is None:
            return None
        cells = {key: value for key, value in self.cells.items() if _same(value, later.cells[key])}
        inner = {key: self.inner[key].without(later.inner.get(key)) for key in self.inner if key in cells}
        return Captured(
            cells,
            {key: value for key, value in self.globals.items() if _same(value, later.globals[key])},
            {key: value for key, value in inner.items() if value is not None},
        )


def captured(function: Callable[..., Any], depth: int = _DEPTH) -> Captured | None:
    """What the variables hold that ``function`` looks up outside of itself; None where it has none."""
    plain = _plain(function)
    if plain is None or depth == 0:
        return None
    indices, names = _looked_up(plain.__code__)
    if not indices and not names:
        return None
    space = plain.__globals__
    cells = {index: _content(plain, index) for index in indices}
    inner = {
        index: found
        for index, value in cells.items()
        if type(value) is types.FunctionType and (found := captured(value, depth - 1)) is not None
    }
    return Captured(cells, {name: _noted(space.get(name, _MISSING)) for name in names}, inner)


def bound(function: Callable[..., Any], then: Captured) -> Callable[..., Any]:
    """``function``, or a copy of it whose variables hold what they held then, where some hold something else now."""
    now = captured(function, 1)
    if now is None:
        return function
    cells = {index: value for index, value in then.cells.items() if not _same(value, now.cells[index])}
    names = {name: value for name, value in then.globals.items() if not _same(value, now.globals[name])}
    cells = {index: value for index, value in cells.items() if not (value is _MISSING or value is Tensor)}
    names = {name: value for name, value in names.items() if not (value is _MISSING or value is Tensor)}
    for index, inner in then.inner.items():
        before = then.cells[index]
        copied = bound(before, inner)
        if copied is not before:
            cells[index] = copied
    return _copy(function, cells, names) if cells or names else function


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


def _copy(function: Any, cells: dict[int, Any], names: dict[str, Any]) -> Any:
    if isinstance(function, functools.partial):
        return functools.partial(_copy(function.func, cells, names), *function.args, **function.keywords)
    if type(function) is types.MethodType:
        return types.MethodType(_copy(function.__func__, cells, names), function.__self__)
    closure = [
        types.CellType(cells[index]) if index in cells else cell
        for index, cell in enumerate(function.__closure__ or ())
    ]
    space = _Namespace(function.__globals__, names) if names else function.__globals__
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, tuple(closure))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _plain(function: Any) -> types.FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    return function if type(function) is types.FunctionType else None


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
def _looked_up(code: types.CodeType) -> tuple[tuple[int, ...], tuple[str, ...]]:
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
