/* The last accesses of every byte, and whether a new one is ordered after them. */
#pragma once
#include "work.h"

typedef struct Cell Cell;
typedef enum { SPACE_SHARED, SPACE_GLOBAL, SPACE_TMEM } HistorySpace;
typedef enum { WEAK, SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS } Scope; /* strong accesses carry a scope */

/* The last writer, and the readers since its write. There is one cell for GRANULE bytes of memory, or for each of them, and for each
 * 32-bit cell of TMEM. */
struct Cell {
    u32 writer, writer_clock; /* actor = cluster serial << 16 | index; clock 0: nobody yet */
    u32 reader, reader_clock; /* reader == MANY_READERS: reader_clock is the index of a set */
    u32 writer_ins, reader_ins;
    u8 writer_lane, reader_lane; /* reader_lane: SEVERAL if lanes have read that have not met since */
    u8 writer_async, reader_async; /* reader_async: REWRITES if it wrote the value that the byte had already */
    u8 writer_scope, reader_scope;
    u8 written; /* 1: by the program; 2: it was there before */
    u8 rewritten; /* somebody not ordered after the writer has written the same value */
};
enum { GRANULE = 4 };
struct Granule {
    Cell cell; /* the cell of all its bytes, or a mark that says where each byte has its own cell */
};
static inline u64 granules(u64 bytes) { return (bytes + GRANULE - 1) / GRANULE; }

typedef struct {
    Cluster *cluster;
    Cta *cta;
    const Knowledge *know; /* what the actor knew when it issued the access */
    u32 actor, clock;      /* what to leave behind */
    s32 ins;
    u32 lanes_met; /* Warp.lanes_met, of a lane's own access */
    u16 warp;
    u8 lane;
    u8 async; /* through the async proxy */
    u8 in_either; /* in the order of its address for both proxies: no fence is due behind it */
    u8 scope;
    HistorySpace space;
} Access;

Access warp_access(Warp *w, const Ins *i, int lane, HistorySpace space); /* a generic, weak access of the warp */
Access work_access(Work *work, u32 actor, u32 clock, HistorySpace space); /* an access of the async proxy, for what the sender knew */
void history_read(Cell *cell, u64 n, const Access *a, u64 address);
void history_write(Cell *cell, u64 n, const Access *a, u64 address);
/* These take n bytes that begin `offset` bytes into the memory to which the granules belong. */
void bytes_read(Granule *granule, u64 offset, u64 n, const Access *a, u64 address);
void bytes_written(Granule *granule, u64 offset, u64 n, const Access *a, u64 address, const u8 *old_value, const u8 *new_value);
void region_history(Region *r, u64 offset, u64 n, const Access *a, const u8 *old_value, const u8 *new_value, bool write);
void copy_cells(const Granule *granule, u64 offset, u64 n, Cell *to);       /* one for each byte, to look at */
void forget_bytes(Granule *granule, u64 bytes);                          /* before they are freed */
void note_left(Region *r);                                          /* what a grid behind must know, out of all its pages */
void free_pages(Region *r);
void free_histories(void);
