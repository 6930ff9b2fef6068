"""Time calls against each other: A B A B, each after a flush of the L2 cache."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""More than the L2 of any card: what a decode step finds there is not its last step's."""


def interleaved(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float, most: int = 20
) -> dict[str, list[float]]:
    """Return the seconds of every repetition of every call; they take turns.

    Args:
        seconds: for all of them together, roughly; at least 3 repetitions each.
        most: repetitions of each.
    """
    for call in calls.values():
        call()  # compiles, allocates
    timer = _cuda_timer(device) if device.type == "cuda" else _host_timer
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for repetition in range(most):
        if repetition >= 3 and time.perf_counter() - started > seconds:
            break
        for name, call in calls.items():
            times[name].append(timer(call))
    return times


def _cuda_timer(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(call: Callable[[], Any]) -> float:
        return gpu_seconds(call, ahead=200_000, before=scratch.zero_)

    return timed


def gpu_seconds(
    call: Callable[[], Any], ahead: int, before: Callable[[], Any] = lambda: None
) -> float:
    """Time the GPU for what ``call`` launches, queued while it waits ``ahead`` cycles.

    What ``before`` launches runs first, untimed, and lengthens the wait.
    """
    start, end = event(), event()
    queue_ahead(ahead)
    before()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


def replay_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture what ``call`` launches into a CUDA graph, and return what replays it.

    A server decodes from graphs: what Python costs between two launches is no part of a step.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # loads what a capture may not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def queue_ahead(cycles: int) -> None:
    """Make an idle GPU wait, so that launches are queued when it goes on, and are not timed."""
    torch.cuda.synchronize()
    cuda: Any = torch.cuda  # this one is untyped
    cuda._sleep(cycles)


def event() -> torch.cuda.Event:
    """Make an event for times on the current stream."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_timer(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def summary(times: list[float]) -> dict[str, float]:
    """Return median and extremes, in microseconds."""
    micro = [second * 1e6 for second in times]
    return {
        "median_us": statistics.median(micro),
        "min_us": min(micro),
        "max_us": max(micro),
        "repetitions": len(micro),
    }
