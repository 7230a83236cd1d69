"""What stood there before a figure was measured: written down before the run, not changed after it.

`measured` is a figure of this project's H200 (2026-11-21 or 23), `published` was read somewhere, `assumed` was fitted
or supposed by the prototype of the clock, `predicted` is a guess made for the first run. A Blackwell has no
expectations of its own: its figures stand beside Hopper's, but for tcgen05.
"""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    value: float
    source: str


_WRITTEN = """
fetch: measured
  fma 2 KiB, 4 warps in step 3.65
  fma 2 KiB, 8 warps in step 3.91
  fma 2 KiB, 16 warps in step 3.89
  fma 8 KiB, 16 warps in step 3.95
  fma 16 KiB, 16 warps in step 3.95
  fma 24 KiB, 16 warps in step 3.97
  fma 32 KiB, 4 warps in step 3.31
  fma 32 KiB, 8 warps in step 3.90
  fma 32 KiB, 16 warps in step 3.95
  fma 48 KiB, 4 warps in step 1.43
  fma 48 KiB, 8 warps in step 3.03
  fma 48 KiB, 16 warps in step 2.15
  fma 128 KiB, 4 warps in step 1.39
  fma 128 KiB, 8 warps in step 3.04
  fma 128 KiB, 16 warps in step 2.26
fetch: predicted
  fma 32 KiB, 16 warps apart 3.8
  fma 128 KiB, 16 warps apart 1.5
  mix 8 KiB, 16 warps in step 3.2
  mix 32 KiB, 16 warps in step 3.2
  mix 128 KiB, 16 warps in step 1.9
  first time through 8 KiB 60
  first time through 32 KiB 60
issue: published
  fma.f32: latency 4
  add.f32: latency 4
  mul.f32: latency 4
  mad.s32: latency 4
  lop3: latency 4
  ex2: latency 20
  shfl: latency 25
  fma.f32: rate, 4 warps 1
  lop3: rate, 4 warps 2
  mad.s32: rate, 4 warps 2
  shfl: rate, 4 warps 4
  popc: rate, 4 warps 8
  cvt.s32.f32: rate, 4 warps 8
issue: measured
  ex2: rate, 4 warps 8
  tanh: rate, 4 warps 8
  ex2.bf16x2: rate, 4 warps 16
  mul.bf16x2: rate, 4 warps 1.14
  cvt.bf16x2.f32: rate, 4 warps 2.06
issue: predicted
  fma.bf16x2: latency 5
  prmt: latency 4
  shf: latency 4
  selp: latency 4
  setp, selp: latency 10
  cvt.bf16x2.f32: latency 5
  cvt.tf32.f32: latency 14
  rcp: latency 20
  sqrt: latency 20
  fma.bf16x2: rate, 4 warps 1.14
  prmt: rate, 4 warps 2
  selp: rate, 4 warps 2
  rcp: rate, 4 warps 8
  sqrt: rate, 4 warps 8
  vote: rate, 4 warps 2
  redux: rate, 4 warps 8
  mix 1 fma.f32+1 lop3: 4 warps 1
  mix 1 fma.f32+1 mad.s32: 4 warps 0.67
  mix 1 lop3+1 mad.s32: 4 warps 1
  mix 1 lop3+1 cvt.bf16x2.f32: 4 warps 0.5
  mix 1 fma.f32+1 cvt.bf16x2.f32: 4 warps 1
  mix 1 fma.f32+1 fma.bf16x2: 4 warps 0.9
  mix 1 lop3+1 prmt: 4 warps 0.5
  mix 7 fma.f32+1 ex2: 4 warps 0.98
  mix 3 fma.f32+1 ex2: 4 warps 0.5
  mix 3 fma.f32+1 lds: 4 warps 0.98
  mix 2 fma.f32+2 lop3: 4 warps 1
  mix 7 fma.f32+4 lop3+1 cvt.bf16x2.f32+2 lds+1 prmt+1 ex2: 4 warps 0.9
  lds: burst of 32 64
  ex2: burst of 32 230
shared: published
  LDS.32: latency 29
  LDS.32: rate 1
  LDS.64: rate 2
  LDS.128: rate 4
  LDS.32, 2 ways: rate 2
  LDS.32, 32 ways: rate 32
  STS.32: rate 1
  STS.64: rate 2
  STS.128: rate 4
  LDSM.x4: rate 4
  STSM.x4: rate 4
shared: predicted
  LDS.64: latency 30
  LDS.128: latency 34
  LDS.32, 2 ways: latency 31
  LDS.32, 32 ways: latency 91
  LDSM.x4: latency 33
  LDSM.x4.trans: rate 4
  LDS.128, rows of 144 bytes: rate 4
  LDS.128, rows of 128 bytes: rate 32
  4 STS.128, proxy fence, 4 warps 90
  0 STS.128, proxy fence, 1 warps 20
  neighbour's LDS.32: latency 200
  neighbour's LDS.128: rate, one pair 32
shared: assumed
  neighbour's STS.128: rate, one pair 32
mma: published
  m16n8k16 bf16: latency through C 33
  m16n8k16 bf16: rate, 4 warps 6.4
  m16n8k8 tf32: rate, 4 warps 6.4
mma: predicted
  m16n8k8 bf16: latency through C 18
  m16n8k8 tf32: latency through C 18
  m16n8k4 tf32: rate, 4 warps 4
  m16n8k8 bf16: rate, 4 warps 4
wgmma: measured
  n64 SS: 8 steps and a wait 311
  n64 RS: 8 steps and a wait 312
wgmma: assumed
  n64 SS: a step, no waits 32
  n128 SS: a step, no waits 64
  n256 SS: a step, no waits 128
  n64 SS: 1 steps and a wait 72
  n128 SS: 4 steps and a wait 296
  n256 SS: 4 steps and a wait 552
wgmma: predicted
  n8 SS: a step, no waits 16
  n16 SS: a step, no waits 16
  n32 SS: a step, no waits 20
  n64 RS: a step, no waits 32
  n256 RS: a step, no waits 128
  n64 SS tf32: a step, no waits 32
  n64 SS B transposed: a step, no waits 32
  n64 SS: 4 steps, one group ahead 128
  n64 SS: a step beside LDS.128 44
  n256 SS: a step beside LDS.128 140
  LDS.128 beside n64 SS 8
  LDS.128 beside n256 SS 6
  LDS.128 beside n64 RS 6
  n64 SS: 4 STS.128, fence, barrier, product 330
memory: published
  L1 hit: latency 35
  L2 hit in 1 MiB: latency 265
  L2 hit in 8 MiB: latency 265
  HBM in 256 MiB: latency 600
  HBM in 4 GiB: latency 800
  L2 hits, 132 SMs 27
memory: measured
  HBM, 132 SMs 15.9
  HBM, 132 SMs, of all 4.15
  copy in HBM, bytes read and written, of all 3.97
memory: predicted
  L1 hits, LDG.128 64
  L2 hits, 1 SMs 60
  L2 hits, each line read by 132 SMs 40
  L2 lines from one SM, nearest tenth 210
  L2 lines from one SM, median 265
  L2 lines from one SM, farthest tenth 320
  L2 latency, 131 SMs reading 600
  HBM latency, 131 SMs reading 1300
  HBM, 1 SMs 45
  cp.async of 16 bytes and its wait, L2 hit 300
  spill and reload: latency 40
  spill stores, 16 warps 1
  spill reloads, 16 warps 1
  stores to L2, 132 SMs 27
  stores to HBM, of all 3.2
bulk: assumed
  bulk load of 16, L2 hit: latency 435
  bulk load of 16384, L2 hit: latency 690
  bulk loads of 8192, 8 in flight, L2 hits, 1 SMs 64
  box of 64 x 64 bf16, L2 hit: latency 560
  sends of 4096, 8 in flight, one pair 32
  128 to a neighbour, and an arrival back 930
bulk: predicted
  bulk loads of 8192, 8 in flight, L2 hits, 132 SMs 27
  bulk loads of 8192, 8 in flight, HBM, all SMs 15.9
  bulk store of 4096 until read 350
  bulk store of 4096 until done 800
  multicast in clusters of 2, 16384 a stage, 8 stages, all SMs: received 45
  bulk load of 16384 after no prefetch 1100
  bulk load of 16384 after a prefetch 4,000 clocks before 690
barriers: measured
  mbarrier hop, 1 arrivals, 1 warps wait 47
  mbarrier hop, 128 arrivals, 4 warps wait 53
  mbarrier hop to a neighbour, 1 arrivals, 1 warps wait 479
  bar.sync of 4 warps 33
  bar.sync of 8 warps 41
  bar.sync of 12 warps 49
  barrier of a cluster of 2, 128 threads each 343
barriers: predicted
  bar.sync of 1 warps 20
  bar.sync of 16 warps 57
  bar.sync of 32 warps 89
  mbarrier hop, 32 arrivals, 1 warps wait 50
  mbarrier hop to a neighbour, 128 arrivals, 4 warps wait 520
  mbarrier: wait for a phase that is over 20
  barrier of a cluster of 4, 128 threads each 360
  barrier of a cluster of 16, 128 threads each 420
  named barriers in turn, 4 and 4 warps: a hop 35
  fence.acq_rel.gpu, nothing to wait for 150
  STG and fence.acq_rel.gpu 700
  setmaxnreg down and up, 4 warpgroups 60
launches: assumed
  CTA to CTA on an SM, 384 threads 600
launches: predicted
  kernel to kernel on an SM, 384 threads, 200 KiB, plain: to its start 2600
  kernel to kernel on an SM, 384 threads, 200 KiB, programmatic, told at the start: to its work 1500
  kernel to kernel on an SM, 128 threads, 1 KiB, programmatic, told at the start: to its work 900
  an empty kernel in a graph, one CTA 1.3
  a launch by the host, one CTA 2.5
  CTA to CTA on an SM, clusters of 2, 384 threads 900
clock: measured
  clock, nothing but a spin 1980
clock: predicted
  clock, FMA on every SM 1980
  clock, wgmma on every SM, random operands 1500
  clock, wgmma on every SM, ones 1900
  clock, reading HBM on every SM 1980
  step of %globaltimer 32
tcgen05: published
  m128 n128 SS: a step, no waits 64
  m128 n256 SS: a step, no waits 128
  m64 n128 SS: a step, no waits 64
  m64 n256 SS: a step, no waits 128
tcgen05: assumed
  commit of nothing to the wake of 1 warps 90
  tcgen05.ld 32x32b.x32, 1 ahead of a wait, 1 warps 57
"""


def _read(text: str) -> dict[tuple[str, str], Expected]:
    figures, group, source = {}, "", ""
    for line in filter(None, text.splitlines()):
        if not line.startswith(" "):
            group, source = line.split(": ")
            continue
        name, _, value = line.strip().rpartition(" ")
        figures[group, name] = Expected(float(value), source)
    return figures


EXPECTED = _read(_WRITTEN)
