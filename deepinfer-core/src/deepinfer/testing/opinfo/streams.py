"""Checks of the runtime ops about order: streams, events, synchronisation, graphs."""

from __future__ import annotations

import threading

import torch

from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.expect import raises, require


def streams(trio: Trio) -> None:
    """Work on two streams in the order that events give it."""
    ctx, runtime = trio.found, trio.found.ops.runtime
    main, side = runtime.current_stream(), runtime.new_stream()
    x, ready = torch.zeros(1 << 16, device=ctx.device), runtime.new_event()
    side.wait_stream(main)
    with runtime.use_stream(side):
        require(runtime.current_stream() == side != main, "use_stream does not change the current stream")
        busy(ctx)
        x.add_(1)
        ready.record(side)
        runtime.record_use(x, side)
    require(runtime.current_stream() == main, "the stream before is not restored")
    main.wait_event(ready)
    x.mul_(3)
    side.wait_stream(main)
    with runtime.use_stream(side):
        total = x.sum()
    main.wait_event(side.record_event())
    require(total.item() == 3 * x.numel(), f"1 + 0, then times 3, sums up to {total.item()} over {x.numel()} elements")
    side.synchronize()
    require(side.query(), "a synchronized stream is not finished")


def busy(ctx: SampleContext, rounds: int = 20) -> None:
    """Work for the current stream that takes a device a while; a host is done when this returns."""
    size = 64 if ctx.device.type == "cpu" else 2048
    x = torch.ones(size, size, device=ctx.device)
    for _ in range(rounds):
        x = x @ x * (1 / size)


def stream_of_thread(trio: Trio) -> None:
    runtime, seen = trio.found.ops.runtime, []
    side = runtime.new_stream()
    with runtime.use_stream(side):
        thread = threading.Thread(target=lambda: seen.append(runtime.current_stream()))
        thread.start()
        thread.join()
    require(seen and seen[0] != side, "another thread finds the stream that this thread uses")


def stream_after_error(trio: Trio) -> None:
    runtime = trio.found.ops.runtime
    outer, inner = runtime.new_stream(), runtime.new_stream()
    with runtime.use_stream(outer):
        try:
            with runtime.use_stream(inner):
                raise KeyError
        except KeyError:
            pass
        require(runtime.current_stream() == outer, "an exception inside the scope leaves its stream current")


def separate_streams(trio: Trio) -> None:
    runtime = trio.found.ops.runtime
    a, b = runtime.new_stream(), runtime.new_stream()
    require(a != b and runtime.current_stream() not in (a, b), "two new streams are one, or the current one")
    require(a.query() is True, "a new stream has work")


def events(trio: Trio) -> None:
    ctx, runtime = trio.found, trio.found.ops.runtime
    require(runtime.new_event().query() is True, "an event that was never recorded is not finished")
    start, end = runtime.new_event(True), runtime.new_event(True)
    start.record()
    busy(ctx)
    end.record()
    end.synchronize()
    require(start.query() and end.query(), "a synchronized event is not finished")
    elapsed = start.elapsed_time(end)
    require(0 <= elapsed < 60_000, f"elapsed_time is {elapsed}, expected milliseconds")
    raises(Exception, lambda: runtime.new_event().elapsed_time(end), "elapsed_time of an event that keeps no time")


def record_use(trio: Trio) -> None:
    """Memory let go while another stream still reads it is not handed out again before."""
    ctx, runtime = trio.found, trio.found.ops.runtime
    side, results = runtime.new_stream(), []
    for value in range(8):
        x = torch.full((1 << 16,), float(value), device=ctx.device)
        side.wait_stream(runtime.current_stream())
        with runtime.use_stream(side):
            busy(ctx, 4)
            results.append(x.sum())
        runtime.record_use(x, side)
        del x
        torch.full((1 << 16,), -1.0, device=ctx.device)
    side.synchronize()
    found = [r.item() / (1 << 16) for r in results]
    require(found == list(map(float, range(8))), f"reads {found} from memory that held 0 .. 7")


def synchronize(trio: Trio) -> None:
    ctx, runtime = trio.found, trio.found.ops.runtime
    done = runtime.new_event()
    with runtime.use_stream(runtime.new_stream()) as side:
        busy(ctx)
        done.record(side)
    runtime.synchronize()
    require(done.query(), "work of another stream is unfinished after synchronize")


# graphs


def capture(trio: Trio) -> None:
    ctx, runtime = trio.found, trio.found.ops.runtime
    x, weight = torch.ones(4, device=ctx.device), torch.full((4,), 2.0, device=ctx.device)
    graph = runtime.capture(lambda: x * weight + 1, runtime.new_graph_pool())
    require(graph.replay().tolist() == [3.0] * 4, "the first replay gives other numbers than the function")
    x.fill_(5)
    require(graph.replay().tolist() == [11.0] * 4, "a replay does not see what was written to the operands")
    require(x.tolist() == [5.0] * 4, "a replay changed its operand")
    graph.destroy()
    graph.destroy()


def pool(trio: Trio) -> None:
    """Two graphs that share memory, replayed in turn."""
    ctx, runtime = trio.found, trio.found.ops.runtime
    shared, x = runtime.new_graph_pool(), torch.arange(4.0, device=ctx.device)
    first = runtime.capture(lambda: x + 1, shared)
    second = runtime.capture(lambda: x * 10, shared)
    for value in (1.0, 2.0):
        x.fill_(value)
        require(first.replay().tolist() == [value + 1] * 4, "the first of two graphs in a pool gives wrong numbers")
        require(second.replay().tolist() == [value * 10] * 4, "the second of two graphs in a pool gives wrong numbers")
    first.destroy(), second.destroy()
