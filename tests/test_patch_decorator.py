"""@patch() on every kind of function, and copies of a patch: what holds the patch, and for how long."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle

import pytest
import torch
from watched import watch

import fused_softmax as fs
from fused_softmax.patch import _enabled

pytestmark = pytest.mark.interpreted

X = torch.randn(2, 4)


@pytest.fixture(autouse=True)
def _nothing_stays():
    assert set(_enabled.values()) == {0}
    yield
    assert set(_enabled.values()) == {0}


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    return watch(monkeypatch)


def held() -> bool:
    return _enabled["softmax"] > 0


def test_a_coroutine_function(calls):
    @fs.patch()
    async def body(x):
        await asyncio.sleep(0)
        assert held()
        return torch.softmax(x, -1)

    assert inspect.iscoroutinefunction(body)
    coroutine = body(X)
    assert not held()
    torch.testing.assert_close(asyncio.run(coroutine), torch.softmax(X, -1))
    assert calls == ["softmax_forward"]


def test_coroutines_at_the_same_time_and_one_that_raises():
    started = []

    @fs.patch()
    async def body(turns, fails=False):
        started.append(turns)
        for _ in range(turns):
            assert held()
            await asyncio.sleep(0)
        if fails:
            raise KeyError
        return turns

    async def together():
        return await asyncio.gather(body(3), body(1, fails=True), body(5), return_exceptions=True)

    results = asyncio.run(together())
    assert results[::2] == [3, 5]
    assert isinstance(results[1], KeyError)

    async def cancelled():
        task = asyncio.create_task(body(10**6))
        await asyncio.sleep(0)
        assert held()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_a_generator_function(calls):
    @fs.patch()
    def steps(n):
        got = []
        for i in range(n):
            assert held()
            try:
                got.append((yield torch.softmax(X, -1) * i))
            except KeyError:
                got.append("thrown")
        return got

    assert inspect.isgeneratorfunction(steps)
    generator = steps(3)
    assert not held()  # no step yet
    next(generator)
    assert held()  # between steps
    generator.send("sent")
    generator.throw(KeyError())
    with pytest.raises(StopIteration) as stopped:
        next(generator)
    assert stopped.value.value == ["sent", "thrown", None]
    assert not held()
    assert calls == ["softmax_forward"] * 3
    generator = steps(3)
    next(generator)
    generator.close()
    assert not held()
    generator = steps(3)
    next(generator)
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError())


def test_an_asynchronous_generator_function(calls):
    closed = []

    @fs.patch()
    async def steps(n):
        got = []
        try:
            for i in range(n):
                await asyncio.sleep(0)
                assert held()
                try:
                    got.append((yield torch.softmax(X, -1) * i))
                except KeyError:
                    got.append("thrown")
        finally:
            await asyncio.sleep(0)
            closed.append(got)

    assert inspect.isasyncgenfunction(steps)

    async def through():
        generator = steps(3)
        assert not held()
        await generator.__anext__()
        assert held()
        await generator.asend("sent")
        await generator.athrow(KeyError())
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()
        assert not held()
        generator = steps(3)
        await generator.__anext__()
        await generator.aclose()
        assert not held()
        generator = steps(3)
        await generator.__anext__()
        with pytest.raises(ZeroDivisionError):
            await generator.athrow(ZeroDivisionError())
        assert not held()
        return [i async for i in steps(2)]

    assert len(asyncio.run(through())) == 2
    assert closed == [["sent", "thrown", None], [], [], [None, None]]
    assert calls == ["softmax_forward"] * 7


def test_partials_methods_and_names():
    class Model:
        @fs.patch()
        async def forward(self, x):
            """What it does."""
            return held()

    assert asyncio.run(Model().forward(X))
    assert Model.forward.__doc__ == "What it does."

    async def body(x):
        return held()

    def steps(x):
        yield held()

    assert asyncio.run(fs.patch()(functools.partial(body, X))())
    assert list(fs.patch()(functools.partial(steps, X))()) == [True]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_of_an_enabled_patch_holds_nothing(make):
    first = fs.patch(ops=("softmax",))
    with first:
        other = make(first)
        assert other.ops == first.ops
        with pytest.raises(RuntimeError, match="without its enable"):
            other.disable()
        with other:
            assert _enabled["softmax"] == 2
        assert _enabled["softmax"] == 1
    assert not held()
