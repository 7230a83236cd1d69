/* What a launch found wrong. The first of its kind at a pair of instructions is kept, the others are counted. */
#pragma once
#include "machine.h"

typedef enum {
    OUT_OF_BOUNDS = 1, MISALIGNED, UNINITIALISED, RACE_WRITE_WRITE, RACE_WRITE_READ, RACE_READ_WRITE, PROXY_RACE, LANE_RACE,
    BAD_BARRIER, BAD_MBARRIER, DEADLOCK, LIVELOCK, DIVERGED, BAD_LANE, TMEM_LEAK, TMEM_MISUSE, BAD_DESCRIPTOR, BAD_TENSOR_MAP,
    BAD_OPERAND, PEER_EXITED, REGISTER_IN_FLIGHT, GROUP_MISUSE, MBARRIER_OVERWRITTEN, TOO_MANY_INSTRUCTIONS, UNSUPPORTED,
    TENSOR_UNFENCED, MBARRIER_UNFENCED, LANES_APART, REGISTER_UNFENCED, GRIDS_RACE, LOAD_NOT_AWAITED, VISIT_UNORDERED,
    COPY_AT_EXIT, UNWRITTEN, PRODUCTS_UNORDERED, SCOPE_OF_CTA, DISCARDED,
} FindingKind;

struct Finding {
    s32 kind, ins, other_ins, cta, warp, lane, space;
    s32 actor;                                  /* in a race: the kind of actor that made this access */
    s32 other_actor, other_cluster, other_warp; /* who did the other access: its kind, which cluster, which of that one's warps; -1: unknown */
    s32 padding;
    u64 address, size, count; /* count: how often; the first place is kept */
    s64 detail[4];            /* what a kind's wording asks for */
    char text[160];           /* what was found, in words; may be empty */
};

Finding *find_at(Machine *m, FindingKind kind, const Warp *w, int lane, s32 ins, s32 other_ins, u64 address, u64 size);
Finding *find(const Warp *w, const Ins *i, int lane, FindingKind kind, u64 address, u64 size, const char *format, ...)
    __attribute__((format(printf, 7, 8)));
void stop(Machine *m); /* after a finding with which going on makes no sense */
