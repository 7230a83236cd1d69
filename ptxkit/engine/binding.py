"""The engine from Python: its records, as its headers have them, and its functions."""

from __future__ import annotations

import ctypes
import functools
import tempfile
import threading

from ptxkit.engine import build

U32, U64, S32, S64, F64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class FindingRecord(ctypes.Structure):
    _fields_ = [(n, S32) for n in ("kind", "ins", "other_ins", "cta", "warp", "lane", "space")]
    _fields_ += [(n, S32) for n in ("actor", "other_actor", "other_cluster", "other_warp", "padding")]
    _fields_ += [(n, U64) for n in ("address", "size", "count")]
    _fields_ += [("detail", S64 * 4), ("text", ctypes.c_char * 160)]


class Counter(ctypes.Structure):
    _fields_ = [(n, U64) for n in ("issued", "lanes", "global_read", "global_written", "sectors")]
    _fields_ += [(n, U64) for n in ("wavefronts", "wavefronts_needed", "shared_read", "shared_written", "flops")]


class Region(ctypes.Structure):
    _fields_ = [("address", U64), ("size", U64)]
    _fields_ += [(n, ctypes.c_void_p) for n in ("host", "pages", "touched", "ahead", "left", "written")]
    _fields_ += [("writable", S32), ("label", S32)]


TRIGGERED_EARLY = 2  # a bit of LaunchRecord.triggered


class LaunchRecord(ctypes.Structure):
    _fields_ = [("program", ctypes.c_void_p), *((n, U32 * 3) for n in ("grid", "block", "cluster"))]
    _fields_ += [(n, U32) for n in ("arch", "shared_base", "shared_end")]
    _fields_ += [("params", ctypes.c_char_p), ("params_size", U32), ("sms", U32)]
    _fields_ += [("regions", ctypes.POINTER(Region)), ("nregions", S32)]
    _fields_ += [(n, U32) for n in ("early", "checks", "resident")]
    _fields_ += [(n, U64) for n in ("seed", "quantum", "limit", "fatal")]
    _fields_ += [("max_registers", S32), ("max_findings", S32)]
    _fields_ += [("findings", ctypes.POINTER(FindingRecord)), ("nfindings", S32), ("stopped", S32)]
    _fields_ += [("counters", ctypes.POINTER(Counter)), ("issued", U64), ("launched_clusters", U64)]
    _fields_ += [(n, U64) for n in ("async_work", "barrier_waits", "tmem_columns")]
    _fields_ += [("triggered", S32), ("newest", S32), ("clock", ctypes.c_void_p)]


# clock.h, in its order
STALLS = ("wait", "short", "long", "tensor", "math", "mio", "not selected", "barrier", "mbarrier", "cluster", "copies",
          "grid")
PIPES = ("fma", "alu", "special", "mio", "registers", "tensor")
UNITS = (*PIPES, "issue", "shared", "tma", "tcgen05", "l2", "hbm")
OF_A_WARP = len(STALLS) + 2
ORDERED, STORES, THROUGH_SHARED, PAST_L1, HOISTED, BARS_LOADS = 1, 2, 4, 8, 16, 32
CLOCK_CONSTANTS = (
    *("window", "ahead_registers"),
    *("queue_fma", "queue_alu", "queue_special", "queue_mio", "queue_registers", "queue_shared"),
    *("shared_latency", "shared_pass", "l1_latency", "l2_latency", "hbm_latency", "l2_rate", "hbm_rate"),
    *("wgmma_latency", "wgmma_alone", "tensor_rate", "tensor_latency", "tensor_short"),
    *("tmem_latency", "tmem_column"),
    *("barrier_base", "barrier_warp", "mbarrier_wake", "remote_arrival", "cluster_wake"),
    *("tma_latency", "tma_rate", "tma_store_rate", "dsmem_latency", "dsmem_rate", "cp_async_latency", "async_latency"),
    *("start", "gigahertz"),
)


class TimingRecord(ctypes.Structure):
    _fields_ = [("issue", F64), ("busy", F64 * len(PIPES)), ("latency", F64), ("hold", F64), ("operands", F64)]
    _fields_ += [(n, S32) for n in ("first", "nsources", "nresults", "flags", "stall")]


class ClockSetting(ctypes.Structure):
    _fields_ = [("timing", ctypes.c_void_p), ("registers", ctypes.c_void_p), ("nregisters", S64)]
    _fields_ += [(n, U64) for n in ("detailed", "alone", "slots", "resident", "l1_lines", "traced")]
    _fields_ += [("ahead", F64), *((n, F64) for n in CLOCK_CONSTANTS)]
    _fields_ += [("end", F64), ("triggered", F64), ("busy", F64 * len(UNITS))]
    _fields_ += [(n, ctypes.c_void_p) for n in ("stalls", "warps", "begun", "ended", "records")]
    _fields_ += [("nrecords", U64)]


# trace.h, in its order
TRACES = ("issue", "stall", "tensor", "tcgen05", "tma", "shared", "copy", "phase", "barrier")


class TraceRecord(ctypes.Structure):
    _fields_ = [(n, S32) for n in ("kind", "sm", "cta", "warp", "ins", "row")] + [("begins", F64), ("ends", F64)]


class ConstantRecord(ctypes.Structure):
    _fields_ = [("offset", S32), ("width", S32), ("source", S32), ("padding", S32), ("value", U64), ("value2", U64)]


@functools.cache
def engine():
    """Return the loaded library."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:  # a library can only be loaded by its name
        file.write(build.library())
        file.flush()
        lib = ctypes.CDLL(file.name)
    lib.handler_name.restype = ctypes.c_char_p
    lib.new_program.restype = ctypes.c_void_p
    lib.free_program.argtypes = [ctypes.c_void_p]
    lib.free_records.argtypes = [ctypes.c_void_p]
    lib.sizes.restype = U64
    checked = dict(enumerate((LaunchRecord, FindingRecord, Counter, Region)))
    checked |= {6: TimingRecord, 7: ClockSetting, 8: TraceRecord}
    for n, record in checked.items():
        in_c, in_python = lib.sizes(n), ctypes.sizeof(record)
        assert in_c == in_python, f"{record.__name__}: {in_c} bytes in C, {in_python} here"
    return lib


@functools.cache
def handlers():
    """Return name of a handler -> its number."""
    numbers = {}
    while name := engine().handler_name(len(numbers)):
        assert name.decode() not in numbers, f"two handlers are named {name.decode()}"
        numbers[name.decode()] = len(numbers)
    return numbers


def _pointer(numbers):
    """Return a pointer to the numbers of an array.array, which must outlive the call."""
    address, count = numbers.buffer_info()
    return ctypes.c_void_p(address if count else 0)


def new_program(records, args, mods, constants, register_bytes, local_bytes):
    table = (ConstantRecord * max(len(constants), 1))()
    low = (1 << 64) - 1
    for slot, ((width, source, value), offset) in zip(table, constants.items()):
        slot.offset, slot.width, slot.source = offset, width, source
        slot.value, slot.value2 = value & low, value >> 64 & low
    return engine().new_program(
        _pointer(records), S32(len(records) // 9), _pointer(args), S32(len(args)), _pointer(mods), S32(len(mods)),
        table, S32(len(constants)), U64(register_bytes), U64(local_bytes),
    )


def free_program(handle):
    engine().free_program(handle)


_ONE = threading.Lock()  # the engine keeps the sets of readers for one launch at a time


def simulate(launch):
    """Run a launch.  Python hears of Ctrl-C only between calls of C, so the main thread lets another one call."""
    run = engine().simulate
    with _ONE:
        if threading.current_thread() is not threading.main_thread():
            run(ctypes.byref(launch))
            return
        over = threading.Event()

        def call():
            try:
                run(ctypes.byref(launch))
            finally:
                over.set()

        thread = threading.Thread(target=call)
        try:
            thread.start()
            over.wait()
        except BaseException:  # KeyboardInterrupt, or what a handler of signals raises, also while the thread starts
            launch.limit = 1  # instruction: the launch ends after those that it is at
            raise
        finally:
            if thread.is_alive():
                thread.join()
