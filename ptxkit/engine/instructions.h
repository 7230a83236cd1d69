/* A program as the machine runs it: instructions, their operands' places, and the constants of a warp.
 *
 * An operand is an offset into its warp's registers (Ins.arg), also if it is an immediate or a special register. A handler runs one
 * instruction for the lanes of a mask and says how to go on (Outcome).
 */
#pragma once
#include "fields.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

enum { LANES = 32, ALL = -1 };
#define FULL 0xffffffffu

/* Do all n bytes from an address on lie in the `size` bytes from `start` on? No sum is formed, so none wraps around. */
static inline bool lies_within(u64 address, u64 n, u64 start, u64 size) {
    return address >= start && n <= size && address - start <= size - n;
}

typedef struct Warp Warp;
typedef struct Ins Ins;

typedef enum {
    NEXT,   /* go on with the next instruction */
    JUMPED, /* the handler has moved the split itself */
    BLOCK,  /* run this instruction again after some event (see Machine.events) */
    YIELD,  /* go on, but let other warps run first */
} Outcome;

typedef Outcome (*Handler)(Warp *w, const Ins *i, u32 lanes);

typedef struct {
    const char *name;
    Handler run;
} HandlerEntry;

struct Ins {
    Handler run;
    const s32 *arg; /* register-file offsets of the operands, destinations first; -1: absent */
    const s64 *mod; /* widths, spaces, flags: isa/fields.py names them */
    s32 nargs;
    s32 guard;  /* offset of the guard predicate; -1: always */
    s32 negate; /* the guard is @!p */
    s32 join;   /* a branch: the instruction where its lanes meet again; -1: at the exit */
    s32 gather; /* 0; 1: all live lanes of the warp must run it together (.aligned); 2: the lanes of operand mod[MEMBERS_MASK] must (.sync) */
    s32 index;
};

/* What Python hands over for each instruction. */
typedef struct {
    s32 handler, guard, negate, arg, nargs, mod, nmods, join, gather;
} InsRecord;

/* A constant that depends on the warp: filled into its registers when it starts. */
typedef enum {
    SR_TID_X, SR_TID_Y, SR_TID_Z, SR_NTID_X, SR_NTID_Y, SR_NTID_Z,
    SR_CTAID_X, SR_CTAID_Y, SR_CTAID_Z, SR_NCTAID_X, SR_NCTAID_Y, SR_NCTAID_Z,
    SR_CLUSTERID_X, SR_CLUSTERID_Y, SR_CLUSTERID_Z, SR_NCLUSTERID_X, SR_NCLUSTERID_Y, SR_NCLUSTERID_Z,
    SR_CLUSTER_CTAID_X, SR_CLUSTER_CTAID_Y, SR_CLUSTER_CTAID_Z, SR_CLUSTER_NCTAID_X, SR_CLUSTER_NCTAID_Y, SR_CLUSTER_NCTAID_Z,
    SR_CLUSTER_CTARANK, SR_CLUSTER_NCTARANK, SR_IS_EXPLICIT_CLUSTER,
    SR_LANEID, SR_WARPID, SR_NWARPID, SR_SMID, SR_NSMID, SR_GRIDID,
    SR_LANEMASK_EQ, SR_LANEMASK_LE, SR_LANEMASK_LT, SR_LANEMASK_GE, SR_LANEMASK_GT,
    SR_TOTAL_SMEM, SR_DYNAMIC_SMEM, SR_AGGR_SMEM,
    SR_CONSTANT,       /* value, as it is */
    SR_SHARED_ADDRESS, /* value = offset in the CTA's shared memory: its 32-bit cluster address */
} Source;

typedef struct {
    s32 offset; /* in the register file */
    s32 width;  /* 4, 8 or 16 bytes a lane; 0: a predicate, all lanes */
    s32 source, padding;
    u64 value, value2;
} ConstantRecord;

typedef struct {
    Ins *ins;
    s32 count;
    u64 register_bytes; /* those of one warp */
    u64 local_bytes;    /* those of one thread */
    const ConstantRecord *constants;
    s32 nconstants;
    s32 *args;
    s64 *mods;
    Handler *handlers;
} Program;
