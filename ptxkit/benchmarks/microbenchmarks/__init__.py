"""What a GPU's units take, one figure at a time: the source of the constants of the simulator's clock.

  python -m ptxkit.benchmarks.microbenchmarks [--group fetch,issue] [--json FILE]

A group is one file with a function `measure(bench)`: it writes small kernels (CUDA C++ around inline PTX, built by
`ptxkit.compile.nvrtc`), launches each several times and hands over figures with their spread and what was checked.

  figures.py    what a figure is; how it is printed and kept
  expected.txt  what was published, assumed or measured before, and what was predicted for this run
  bench.py      builds, looks at the machine code, launches; on a GPU, in the simulator, or not at all
  frame.py      the C++ that kernels share: the timed loop; mbarriers and copies are in prelude.cuh
  groups.py     the groups, and the process with a time limit that each runs in
"""
