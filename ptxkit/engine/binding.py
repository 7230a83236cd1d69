"""The engine from Python: its records, as its headers have them, and its functions."""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
import threading

from ptxkit.engine import build

U64, S32 = ctypes.c_uint64, ctypes.c_int32
TYPES = {"u32": ctypes.c_uint32, "u64": U64, "s32": S32, "s64": ctypes.c_int64} | {
    "double": ctypes.c_double, "char": ctypes.c_char,
}
TRIGGERED_EARLY = 2  # a bit of LaunchRecord.triggered
# clock.h, in its order
STALLS = ("wait", "short", "long", "tensor", "math", "mio", "not selected", "barrier", "mbarrier", "cluster", "copies",
          "grid")
PIPES = ("fma", "alu", "special", "mio", "registers", "tensor")
UNITS = (*PIPES, "issue", "shared", "tma", "tcgen05", "l2", "hbm")
OF_A_WARP = len(STALLS) + 2
ORDERED, STORES, THROUGH_SHARED, PAST_L1, HOISTED, BARS_LOADS = 1, 2, 4, 8, 16, 32
# trace.h, in its order
TRACES = ("issue", "stall", "tensor", "tcgen05", "tma", "shared", "copy", "phase", "barrier")
SIZES = {"PIPES": len(PIPES), "UNITS": len(UNITS)}


def _record(name, header, in_c=None, **pointers):
    """Return the class of a struct in a header, where it may be called `in_c`; `pointers` are the types of some."""
    text = re.sub(r"/\*.*?\*/", "", (build.FOLDER / header).read_text(), flags=re.DOTALL)
    in_c = in_c or name
    body = re.search(rf"struct {in_c} {{([^}}]*)}};|typedef struct {{([^}}]*)}} {in_c};", text)
    fields = []
    for type_, names in re.findall(r"(?:const )?(\w+) ([^;]*);", body[1] or body[2]):
        for star, field, count in re.findall(r"(\**)(\w+)(?:\[(\w+)\])?", names):
            kind = pointers.get(field, ctypes.c_void_p) if star else TYPES[type_]
            fields.append((field, kind * (SIZES.get(count) or int(count)) if count else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


FindingRecord = _record("FindingRecord", "findings.h", "Finding")
Counter = _record("Counter", "machine.h")
Region = _record("Region", "machine.h")
LaunchRecord = _record(
    "LaunchRecord", "machine.h", "Launch", params=ctypes.c_char_p, regions=ctypes.POINTER(Region),
    findings=ctypes.POINTER(FindingRecord), counters=ctypes.POINTER(Counter),
)
TimingRecord = _record("TimingRecord", "clock.h", "Timing")
ClockSetting = _record("ClockSetting", "clock.h")
TraceRecord = _record("TraceRecord", "trace.h")
ConstantRecord = _record("ConstantRecord", "instructions.h")
_SETTINGS = [name for name, _ in ClockSetting._fields_]
CLOCK_CONSTANTS = (*_SETTINGS[_SETTINGS.index("window") : _SETTINGS.index("end")],)


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
