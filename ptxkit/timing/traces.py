"""Timelines of launches as JSON trace events: a process per SM, a thread per row, a complete event ("X") per slice."""

from __future__ import annotations

# Names of chrome://tracing's palette; Perfetto chooses its own.
COLOURS = {
    "wait": "grey", "short": "thread_state_runnable", "long": "bad", "tensor": "rail_animation", "math": "yellow",
    "mio": "yellow", "not selected": "grey", "barrier": "rail_idle", "mbarrier": "rail_load", "cluster": "rail_idle",
    "copies": "terrible", "grid": "black",
}


def trace(timelines):
    """Return the trace of one launch or of several; a programmatic dependent launch overlaps the previous one."""
    events, first, begins, end = [], 0, 0.0, 0.0
    for timeline in timelines:
        clock = timeline.clock
        begins = end if clock.begins is None else begins + clock.begins
        end = max(end, begins + clock.clocks)
        events += _of_launch(timeline, first, begins)
        first += 1 + max((row.sm for row in timeline.rows), default=-1)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _of_launch(timeline, first, begins):
    gigahertz, several = timeline.clock.chip.gigahertz, max((row.sm for row in timeline.rows), default=0)
    for sm in range(several + 1):
        name = f"{timeline.kernel}, SM {sm}"
        yield {"ph": "M", "name": "process_name", "pid": first + sm, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": first + sm, "args": {"sort_index": first + sm}}
    for tid, row in enumerate(timeline.rows, 1):
        place = {"pid": first + row.sm, "tid": tid}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": row.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
        for s in row.slices:
            yield from _events(s, place, gigahertz, begins)


def _events(s, place, gigahertz, offset):
    """Times are whole nanoseconds, so that what touches does not overlap. Viewers cut microseconds to nanoseconds: a
    quarter more keeps them from losing one."""
    begins, ends = (round((offset + clocks) / gigahertz) for clocks in (s.begins, s.ends))
    if begins == ends:
        return
    args = {"clocks": round(s.clocks, 1)}
    if s.issued:
        args["issued"] = round(s.issued, 1)
    args |= {f"stalled, {why}": round(n, 1) for why, n in sorted(s.stalls.items(), key=lambda item: -item[1])} | s.says
    event = {"ph": "X", "name": s.name, "cat": s.kind, "ts": (begins + 0.25) / 1000, "dur": (ends - begins) / 1000}
    if s.kind == "stall":
        event["cname"] = COLOURS[s.why]
    yield event | place | {"args": args}
    for inner in s.inner:
        yield from _events(inner, place, gigahertz, offset)
