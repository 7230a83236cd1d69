/* The last accesses of every byte, and whether a new one is ordered after them. */
#pragma once
#include "work.h"

typedef enum { SPACE_SHARED, SPACE_GLOBAL, SPACE_TMEM } HistorySpace;
typedef enum { WEAK, SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS } Scope; /* strong accesses carry a scope */

/* What the last writer and the readers since then left behind: one for each byte of memory, one for each 32-bit cell of TMEM. */
struct Cell {
    u32 writer, writer_clock; /* actor = cluster serial << 16 | index; clock 0: nobody yet */
    u32 reader, reader_clock; /* reader == MANY_READERS: reader_clock is the index of a set */
    u32 writer_ins, reader_ins;
    u8 writer_lane, reader_lane; /* reader_lane: or SEVERAL that have not met since */
    u8 writer_async, reader_async; /* reader_async: or REWRITES, a write of the value that was there */
    u8 writer_scope, reader_scope;
    u8 written; /* 1: by the program; 2: it was there before */
    u8 rewritten; /* somebody not ordered after the writer has written the same value */
};

typedef struct {
    Cluster *cluster;
    Cta *cta;
    const Knowledge *know; /* of the actor when it issued the access */
    u32 actor, clock;      /* what to leave behind */
    s32 ins;
    u32 lanes_met; /* Warp.lanes_met, of a lane's own access */
    u16 warp;
    u8 lane;
    u8 async; /* through the async proxy */
    u8 scope;
    HistorySpace space;
} Access;

Access warp_access(Warp *w, const Ins *i, int lane, HistorySpace space); /* a generic, weak access of the warp */
Access work_access(Work *work, u32 actor, u32 clock, HistorySpace space); /* an access of the async proxy, for what the sender knew */
void history_read(Cell *cell, u64 n, const Access *a, u64 address);
void history_write(Cell *cell, u64 n, const Access *a, u64 address, const u8 *old_value, const u8 *new_value);
void note_grid_ahead(Region *r, u64 page);                          /* into a page of cells that is new */
void note_left(Region *r);                                          /* out of all its pages */
void free_reader_sets(void);
