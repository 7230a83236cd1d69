/* The registers that asynchronous work has: those of wgmma, and those that a tcgen05.ld loads. */
#pragma once
#include "machine.h"

enum { SLOT = 64 }; /* no two registers of 32 bits or more start within 64 bytes of the file */
typedef enum { WRITTEN, READ } Use;

typedef struct {
    u64 touched, taken; /* Warp.issued when another instruction, and when a wgmma, last used it */
    u32 clock;   /* the clock of the work that has it; 0: none */
    s32 ins;
    u8 kind, use;
} RegisterState;

typedef struct {
    RegisterState *state; /* [offset / SLOT] */
    s32 *flying;          /* offsets */
    s32 count, room;
    bool fenced;          /* has run a wgmma.fence: from then on uses are watched */
    u64 fence;            /* Warp.issued at the last one */
} Registers;

Registers *registers_of(Warp *w); /* made when first asked for */
void registers_fenced(Warp *w);   /* a wgmma.fence has run */
void registers_touched(Warp *w, const Ins *i); /* an instruction uses registers while some are in flight */
void registers_at_exit(Warp *w);
/* Asynchronous work has these registers until its clock is removed. */
void in_flight_add(Warp *w, const s32 *offsets, s32 count, ActorKind kind, Use use, s32 ins, u32 clock);
void in_flight_remove(Warp *w, ActorKind kind, u32 clock);
void report_register(Warp *w, const Ins *i, const RegisterState *s, const char *what); /* what: uses, writes, ... */
