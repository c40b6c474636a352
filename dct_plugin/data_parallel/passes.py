"""Forward passes of a module and backward passes of the process: what runs before and after them, and which
values parameters hold meanwhile.

The calls of a module are followed where ``nn.Module.compile`` puts compiled code, not by forward hooks. So
copies and pickles of the module, ``torch.jit.script`` and ``torch.export`` find a module as it was.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.optim.swa_utils import AveragedModel

#: The attribute that torch calls in place of a module; ``OptimizedModule`` would set its inner module's.
_PLACE = "_compiled_call_impl"
#: Returns what surrounds a backward pass; it is told whether the pass keeps its graph.
_AroundBackward = Callable[[bool], AbstractContextManager[None]]


class Handle(NamedTuple):
    """Ends what it was returned for, like the handles of torch's hooks."""

    remove: Callable[[], None]


class FollowedCalls:
    """The calls of a module, and functions that run before and after each of them.

    Args:
        module: The module; :func:`calls_of` returns the only object of a module.
    """

    number: ClassVar[int] = 0
    """Functions of all modules that follow calls."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._compiled = module, module.__dict__.get(_PLACE)
        self._call: Callable[..., Any] = self._compiled or module._call_impl
        self._followers: list[tuple[Callable[[bool], None], Callable[[bool], None] | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            return self._call(*args, **kwargs)
        return self._followed(*args, **kwargs)

    # Compiled code cannot change which memory a parameter has; the module itself is compiled all the same.
    @torch.compiler.disable(recursive=False)
    def _followed(self, *args: Any, **kwargs: Any) -> Any:
        with self.enter():
            return self._call(*args, **kwargs)

    @torch.compiler.disable
    def enter(self) -> ExitStack:
        """Call what runs before a pass, and return a context that calls what runs after it."""
        with ExitStack() as stack:
            for before, after in reversed(self._followers):
                before(torch.is_grad_enabled())
                if after is not None:
                    stack.push(lambda kind, *_, after=after: after(kind is not None))
            return stack.pop_all()

    def compile(self) -> None:
        """Take over what ``nn.Module.compile`` has put here."""
        self._call = self._compiled = self._module.__dict__[_PLACE]
        self._module.__dict__[_PLACE] = self

    def follow(
        self,
        before: Callable[[bool], None],
        after: Callable[[bool], None] | None = None,
        *,
        inside: bool = False,
    ) -> Handle:
        """Follow the forward passes of the module; passes of its parts alone are not seen.

        Args:
            before: Called before a pass, and before the functions that were given earlier: True if gradients
                are on.
            after: Called after a pass: True if it has failed.
            inside: Call them nearest to the pass: before it after the functions that were given earlier.
        """
        pair = (before, after)
        self._followers = [pair, *self._followers] if inside else [*self._followers, pair]
        self._module.__dict__[_PLACE] = self
        FollowedCalls.number += 1
        nn.Module.compile = _compile_followed  # type: ignore[method-assign]
        return Handle(lambda: self._remove(pair))

    def _remove(self, pair: Any) -> None:
        self._followers = [each for each in self._followers if each is not pair]
        FollowedCalls.number -= 1
        if not FollowedCalls.number:
            nn.Module.compile = _compile  # type: ignore[method-assign]
        if not self._followers and self._module.__dict__.get(_PLACE) is self:
            del self._module.__dict__[_PLACE]
            if self._compiled is not None:
                self._module.__dict__[_PLACE] = self._compiled

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have None in its place."""
        return {}.get, (None,)


_compile = nn.Module.compile


@functools.wraps(_compile)
def _compile_followed(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    followed = self.__dict__.get(_PLACE)
    _compile(self, *args, **kwargs)
    if isinstance(followed, FollowedCalls):
        followed.compile()


def calls_of(module: nn.Module) -> FollowedCalls:
    """Return the calls of a module."""
    found = module.__dict__.get(_PLACE)
    return found if isinstance(found, FollowedCalls) else FollowedCalls(module)


def is_exporting() -> bool:
    """Return whether ``torch.export`` reads the module."""
    exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.7
    return exporting is not None and bool(exporting())


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` runs, within which no tensor may be written."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# -- backward passes ---


class _Engine(torch._C._ImperativeEngine):
    """torch's engine, which surrounds each backward pass that Python starts with what follows it."""

    followers: tuple[weakref.WeakMethod[_AroundBackward], ...] = ()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; see ``torch.autograd.backward``."""
        keeps = bool(kwargs.get("keep_graph", args[2] if len(args) > 2 else False))
        with ExitStack() as stack:
            for follower in _Engine.followers:
                if (around := follower()) is not None:
                    stack.enter_context(around(keeps))
            return super().run_backward(*args, **kwargs)


def around_backward_passes(around: _AroundBackward) -> Handle:
    """Surround each backward pass of the process, whatever it reaches, also those within others.

    Args:
        around: A bound method, which is referred to weakly.
    """
    follower = weakref.WeakMethod(around)
    _Engine.followers += (follower,)
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()

    def remove() -> None:
        _Engine.followers = tuple(each for each in _Engine.followers if each is not follower and each())
        if not _Engine.followers and isinstance(Variable._execution_engine, _Engine):
            Variable._execution_engine = torch._C._ImperativeEngine()

    return Handle(remove)


#: By module whose passes run at displaced weights, those; their ``hidden()`` is a context of the real ones.
DISPLACED: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()

_update_parameters = AveragedModel.update_parameters


@contextmanager
def weights(model: torch.nn.Module) -> Iterator[None]:
    """Give access to the real weights of ``model`` within the block, for reading and writing.

    It may be a part of the attached model, or contain it.
    With ``local_steps`` they are the common weights. Needed with ``"feedback": "step_ahead"`` between a
    training forward pass and the end of its backward pass; see
    :mod:`dct_plugin.data_parallel.step_ahead.displaced_weights`.
    """
    modules = set(model.modules())
    with ExitStack() as stack:
        for attached, shown in list(DISPLACED.items()):
            if not modules.isdisjoint(attached.modules()):
                stack.enter_context(shown.hidden())
        yield


@functools.wraps(_update_parameters)
def _average_weights(self: AveragedModel, model: torch.nn.Module) -> None:
    with weights(model):
        _update_parameters(self, model)


def register(module: torch.nn.Module, shown: Any) -> None:
    """Note what shows other values in the parameters of a module: :func:`weights` hides them, and
    ``AveragedModel.update_parameters`` reads the real weights.
    """
    DISPLACED[module] = shown
    AveragedModel.update_parameters = _average_weights  # type: ignore[method-assign]


def unregister(shown: Any) -> None:
    """Undo :func:`register`."""
    for module in [module for module, each in DISPLACED.items() if each is shown]:
        del DISPLACED[module]
    if not DISPLACED:
        AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign]


class ModuleHook:
    """A hook that belongs to one module: pickled and copied modules carry one that does nothing, and that
    loads where this package is not installed.

    Args:
        function: The hook.
        module: The hook runs for calls of this module only (shallow copies share hooks).
    """

    def __init__(self, function: Callable[..., None], module: torch.nn.Module) -> None:
        self._function, self._module = function, module

    def __call__(self, called: torch.nn.Module, *arguments: Any) -> None:
        if called is self._module:
            self._function(called, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def remove(handles: list[Any]) -> None:
    """Remove all of these hooks, and empty the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
