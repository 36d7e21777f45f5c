"""Results of an asynchronous device: copied in stream order, waited for once, timed by events."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from deepinfer.runner.inputs import StepResult
from deepinfer.runner.readback import Readback


class LateDevice:
    """Copies happen when an event recorded after them is waited for, as on a real stream; time is counted in marks."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous, self.queue, self.now = asynchronous, [], 0.0

    def capabilities(self):
        return SimpleNamespace(asynchronous=self.asynchronous)

    def pinned(self, shape, dtype):
        return torch.full(shape, -1, dtype=dtype)

    def copy(self, destination, source):
        value = source.clone()  # what the stream sees at this point
        self.queue.append(lambda: destination.copy_(value))
        return destination

    def new_event(self, timed):
        assert timed
        device = self

        class Event:
            def record(self):
                self.at, self.work, device.now = device.now, list(device.queue), device.now + 1.5

            def synchronize(self):
                for copy in self.work:
                    copy()

            def elapsed_time(self, end):
                return end.at - self.at

        return Event()


def step(device, readback, tensor):
    started = readback.begin()
    there = readback.fetch(tensor)
    return readback.end(started, lambda: StepResult(there.clone()))


def test_results_are_copies_in_stream_order():
    device = LateDevice(asynchronous=True)
    readback, values = Readback(SimpleNamespace(runtime=device)), torch.tensor([1, 2])
    first = step(device, readback, values)
    values += 10  # the next step overwrites the device's tensor
    second = step(device, readback, values)
    assert first.result().rows.tolist() == [1, 2]
    assert second.result().rows.tolist() == [11, 12]
    assert (first.result().timing.waited, second.result().timing.waited) == (0.0, 1.5)
    assert second.result().timing.busy == 1.5


def test_host_tensors_are_handed_over_as_they_are():
    device = LateDevice(asynchronous=False)
    readback, values = Readback(SimpleNamespace(runtime=device)), torch.tensor([1, 2])
    assert readback.fetch(values) is values
