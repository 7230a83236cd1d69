/* What a clocked launch leaves of its time, if it is asked for: a record of each slice of a warp, a unit, a copy and a barrier's phase. */
#pragma once
#include "machine.h"

typedef enum {
    TRACE_ISSUE,    /* slots of a warp's scheduler */
    TRACE_STALL,    /* a warp waits; `row`: why (Stall) */
    TRACE_TENSOR,   /* a tensor core works on mma.sync or wgmma; `row`: the quarter of the SM */
    TRACE_TCGEN05,  /* on tcgen05.mma */
    TRACE_TMA,      /* bulk copies begin */
    TRACE_SHARED,   /* passes over shared memory */
    TRACE_COPY,     /* asynchronous work, from when it is sent off until it is done */
    TRACE_PHASE,    /* a phase of an mbarrier; `row`: its address */
    TRACE_BARRIER,  /* from the first arrival to the last; `row`: the barrier's number */
} TraceKind;

typedef struct {
    s32 kind, sm, cta, warp, ins, row; /* sm: among those in detail; warp: of the CTA, -1: none */
    double begins, ends;
} TraceRecord;

/* Each does nothing in a launch that has no trace. `warp` is who sent off what the unit does, or ran the instruction. */
void trace_warp(const Warp *warp, TraceKind kind, s32 ins, s32 row, double begins, double ends);
void trace_barrier(const Cta *cta, TraceKind kind, s32 ins, s32 row, double begins, double ends);
