"""Functions of every kind in whose bodies a context manager holds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def run_within(make: Callable[[], AbstractContextManager[Any]], function: F) -> F:
    """`function`, whose body runs within a context manager of its own; of a generator, each step of the body."""
    within: Callable[..., Any]
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def within(*args: Any, **kwargs: Any) -> Any:
            steps = function(*args, **kwargs)
            advance: Callable[..., Any] = steps.__anext__
            given: tuple[Any, ...] = ()
            try:
                while True:
                    with make():
                        step = await advance(*given)
                    try:
                        advance, given = steps.asend, ((yield step),)
                    except GeneratorExit:
                        raise
                    except BaseException as thrown:
                        advance, given = steps.athrow, (thrown,)
            except StopAsyncIteration:
                return
            finally:
                with make():
                    await steps.aclose()

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def within(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            steps = function(*args, **kwargs)
            advance: Callable[..., Any] = steps.__next__
            given: tuple[Any, ...] = ()
            try:
                while True:
                    with make():
                        step = advance(*given)
                    try:
                        advance, given = steps.send, ((yield step),)
                    except GeneratorExit:
                        raise
                    except BaseException as thrown:
                        advance, given = steps.throw, (thrown,)
            except StopIteration as stop:
                return stop.value
            finally:
                with make():
                    steps.close()

    else:

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with make():
                return function(*args, **kwargs)

    return within  # type: ignore[return-value]
