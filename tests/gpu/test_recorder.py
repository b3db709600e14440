"""Stamps on CUDA: taken without waiting, told later on the host's clock."""

from __future__ import annotations

import pytest
import torch

from slipstream.trace.recorder import Recorder

pytestmark = pytest.mark.gpu


def test_stamps_do_not_wait_and_tell_when_the_gpu_worked():
    device = torch.device("cuda")
    recorder = Recorder(0, 0, 1)
    recorder.stamp(device)  # the first one synchronises
    recorder.begin_step(0, recorder.stamp(device))
    before = recorder.now()
    start = recorder.stamp(device)
    torch.cuda._sleep(400_000_000)  # cycles: at least 0.1 s at up to 4 GHz
    end = recorder.stamp(device)
    issued = recorder.now()
    torch.cuda.synchronize()
    after = recorder.now()
    recorder.add("forward", start, end, ready=end)
    recorder.end_step(recorder.stamp(device))
    iteration, forward = recorder.gather().events
    slack = 1e-3
    assert before - slack <= forward.start <= issued + slack
    assert issued < forward.end <= after + slack
    assert forward.duration > 0.05
    assert forward.args["ready"] == forward.end
    assert iteration.start <= forward.start < forward.end <= iteration.end


def test_stamps_belong_to_the_current_stream():
    device = torch.device("cuda")
    recorder = Recorder(0, 0, 1)
    recorder.begin_step(0, recorder.stamp(device))
    side = torch.cuda.Stream()
    start = recorder.stamp(device)
    torch.cuda._sleep(400_000_000)
    end = recorder.stamp(device)
    with torch.cuda.stream(side):
        beside = recorder.stamp(device)
    recorder.add("forward", start, end)
    recorder.add("allreduce1", beside, beside)
    recorder.end_step(recorder.stamp(device))
    times = {event.name: event for event in recorder.gather().events}
    assert times["allreduce1"].start < times["forward"].end
