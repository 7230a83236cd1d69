"""The C++ that the kernels share.

`loop` is a kernel that runs a body many times between two readings of the SM's clock. Its first pass is short and
fills the instruction cache; the second is the one that counts. Every warp notes its own start and end, so that the
time of a CTA is from the first start to the last end.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
PRELUDE = (HERE / "prelude.cuh").read_text()
WARM = 2                                     # trips of the pass that fills the caches


def kernel(body: str, params: str = "", threads: int = 1024, outside: str = "") -> str:
    """Return a kernel called k that is given `spans` and `out`, and whatever `params` names."""
    more = f", {params}" if params else ""
    return f"""{PRELUDE}{outside}
extern "C" __global__ void __launch_bounds__({threads}, 1) k(u64* spans, u32* out{more}) {{
{body}
}}
"""


def loop(
    body: str, setup: str = "", finish: str = "", params: str = "", threads: int = 1024, outside: str = "",
    drain: str = "",
) -> str:
    """`body` `n` times between two clocks; `setup` before, `finish` behind, `drain` at the end of the timed region."""
    more = f"int n{', ' + params if params else ''}"
    return kernel(
        f"""
  {setup}
  u64 start = 0, end = 0;
  #pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {{
    int trips = pass ? n : {WARM};
    sync_all();
    start = now();
    #pragma unroll 1
    for (int i = 0; i < trips; ++i) {{
{body}
    }}
    {drain}
    end = now();
  }}
  {finish if "note(" in finish else "note(spans, start, end); " + finish}
""",
        more,
        threads,
        outside,
    )


def registers(constraint: str, names: list[str]) -> str:
    """Return the operands of an asm statement: registers("=r", ["a", "b"]) is `"=r"(a), "=r"(b)`."""
    return ", ".join(f'"{constraint}"({name})' for name in names)


def asm(ptx: str, outs: str = "", ins: str = "") -> str:
    """Return a statement that the compiler keeps, and keeps in its place."""
    return f'      asm volatile("{ptx}" : {outs} : {ins} : "memory");'
