/* The time of a launch: when warps issue, when units are free, when memory answers. All times are clocks of an SM from the launch on.
 *
 * A launch without a clock has Machine.time == NULL and Warp.time == NULL; the functions of this file then do nothing and return 0.
 */
#pragma once
#include "trace.h"

/* Units of a quarter of an SM, beside its scheduler. MIO: the way to shared memory, L1 and shuffles; REGISTERS: reads of operands; TENSOR:
 * mma.sync and wgmma. */
typedef enum { PIPE_FMA, PIPE_ALU, PIPE_SPECIAL, PIPE_MIO, PIPE_REGISTERS, PIPE_TENSOR, PIPES } Pipe;
/* The units that are reported: the pipes (the mean of four quarters), then the units of an SM, then those that all SMs share. */
enum { UNIT_ISSUE = PIPES, UNIT_SHARED, UNIT_TMA, UNIT_TCGEN05, UNIT_L2, UNIT_HBM, UNITS };

/* Why a warp does not issue. */
typedef enum {
    STALL_WAIT,         /* a result of fixed latency */
    STALL_SHORT,        /* shared memory, special functions, shuffles */
    STALL_LONG,         /* global memory */
    STALL_TENSOR,       /* a matrix product, or tensor memory */
    STALL_MATH,         /* a unit's queue is full */
    STALL_MIO,          /* shared memory's queue is full */
    STALL_NOT_SELECTED, /* the scheduler issues for another warp */
    STALL_BARRIER,
    STALL_MBARRIER,
    STALL_CLUSTER,
    STALL_COPIES,       /* a wait for a group of copies */
    STALL_GRID,         /* griddepcontrol.wait */
    STALLS
} Stall;

enum { ORDERED = 1, STORES = 2, THROUGH_SHARED = 4, PAST_L1 = 8, HOISTED = 16, BARS_LOADS = 32 };
enum { REGISTERS_AHEAD = 256 };

/* What Python says of each instruction. */
typedef struct {
    double issue;        /* slots of the scheduler */
    double busy[PIPES];  /* clocks that it keeps a unit */
    double latency;      /* from when it begins until its results can be used */
    double hold;         /* clocks until its warp may issue again */
    double operands;     /* clocks of shared memory for the operands of a wgmma */
    s32 first, nsources, nresults; /* its registers: ClockSetting.registers[first ...] */
    s32 flags, stall;    /* ORDERED: begins behind all before it; STORES: nobody waits for its memory; who waits for it stalls for this
                       HOISTED: ptxas moves this load up to the last ORDERED or BARS_LOADS instruction */
} Timing;

/* Python fills the first part and reads the second. */
struct ClockSetting {
    const Timing *timing;
    const s32 *registers;
    s64 nregisters;
    u64 detailed; /* clusters that run in detail, the first ones */
    u64 alone;    /* whether no others run, unless those in detail wait for them */
    u64 slots;    /* places for them: an SM each, or the SMs of a cluster */
    u64 resident; /* clusters at once in a slot */
    u64 l1_lines; /* lines of 128 bytes */
    u64 traced;   /* whether its slices are recorded */
    double ahead; /* when the grid ahead has ended; griddepcontrol.wait waits for it */
    double window;
    double ahead_registers; /* registers that loads moved ahead may fill */
    double queue_fma, queue_alu, queue_special, queue_mio, queue_registers, queue_shared; /* clocks of work that a unit queues before its warps stall */
    double shared_latency, shared_pass, l1_latency, l2_latency, hbm_latency, l2_rate, hbm_rate; /* rates: bytes a clock, of the SMs in detail together */
    double wgmma_latency, wgmma_alone, tensor_rate, tensor_latency, tensor_short, operand_rate; /* of tcgen05: 16-bit multiply-adds, and bytes of operands, a clock */
    double tmem_latency, tmem_column;
    double barrier_base, barrier_warp, mbarrier_wake, remote_arrival, cluster_wake;
    double tma_latency, tma_rate, tma_store_rate, dsmem_latency, dsmem_rate, cp_async_latency, async_latency;
    double start, gigahertz;
    /* results */
    double end;         /* when the last cluster in detail has ended, and its stores */
    double triggered;   /* when the last of its CTAs ran griddepcontrol.launch_dependents; 0: none has */
    double busy[UNITS];
    double *stalls;     /* [instruction][STALLS] */
    double *warps;      /* [warp of a CTA][STALLS, then slots, then clocks lived] */
    double *begun, *ended; /* [cluster] */
    TraceRecord *records; /* if traced: for Python to free (free_records) */
    u64 nrecords;
};
enum { OF_A_WARP = STALLS + 2 };

typedef struct {
    double free, busy;
} Unit;

typedef struct {
    Unit issue[4], pipe[4][PIPES], shared, tma, tcgen05, tmem[4][2]; /* tmem: of 32 lanes each, loads and stores */
    u64 *tag;    /* the L1's: line << 4, and a bit for each of its sectors */
    s32 warps;   /* warps that have started: the next CTA's go to the quarters from there on */
} Sm;

struct Clock {
    ClockSetting *p;
    s32 nsms;
    Sm *sm; /* [slot][rank in the cluster] */
    Unit l2, hbm;
    u64 *sector, sectors, room; /* sectors of 32 bytes that the launch has touched: a hash table */
    u64 *region, regions; /* the number of each region: in the order of their first use, as the host's addresses mean nothing */
    double now;        /* time of the event at hand */
    u64 trace_room;    /* for records */
    s32 next_slot;     /* where the next cluster begins */
    const Cta *acting; /* the CTA whose warp acts; NULL: asynchronous work */
};

struct WarpTime {
    double now;    /* when it may issue next */
    double slot;   /* the instruction at hand: when it was issued, */
    double start;  /* when it had its operands and its units, */
    double loaded; /* when the memory that it reads has answered; 0: it reads none, */
    double wake;   /* until when it waits, */
    double passes; /* and its passes over shared memory */
    double last;   /* when the latest of its instructions began */
    double region; /* since when loads may begin: the latest ORDERED instruction, or store */
    double loaded_at[REGISTERS_AHEAD]; /* when loads of the latest so many registers were issued: a ring */
    u64 nloaded;
    s32 steps;     /* steps of the open group of wgmma */
    double tensor_end, group_end[GROUPS_KEPT]; /* wgmma: when the last one ends; the groups, by number */
    double loads_end, stores_end;              /* tcgen05.ld and st */
    double copies_end, bulk_end;               /* cp.async; bulk copies whose sources have been read */
    double stalls[STALLS], slots, begun;
    double *ready; /* [register] */
    double *early; /* the same if instructions stood as far ahead as dependences in their region let them: what loads' addresses wait for */
    u8 *why;       /* Stall of who waits for it */
    s32 quarter;
    u8 last_why;
};

static inline Sm *sm_of(const Warp *w) { return &w->machine->time->sm[w->cluster->slot * w->cluster->nctas + w->cta->rank]; }

Clock *new_clock(Machine *m);
void free_clock(Machine *m); /* leaves its results in the setting */
void clock_start_warp(Warp *w);
void clock_end_warp(Warp *w);

/* warps.c: may the warp's next instruction issue now? If not, its time has moved, and another warp may be first. */
bool clock_settled(Warp *w, const Ins *i);
void clock_issue(Warp *w, const Ins *i);   /* before it runs for the first time */
void clock_skip(Warp *w, const Ins *i);    /* in its place, if its guard holds for no lane */
void clock_again(Warp *w);                 /* before one that waits runs again */
void clock_done(Warp *w, const Ins *i, bool was_blocked, bool blocked);

/* Handlers call these while an instruction runs. */
static inline double time_of(const Machine *m) { return m->time ? m->time->now : 0; }
static inline void wake_at(Warp *w, double until) { /* it does not go on before */
    if (w->time && until > w->time->wake) w->time->wake = until;
}
double clock_operands(const Warp *w, double from, double bytes); /* when a product of tcgen05 has read so much of shared memory */
void clock_shared(Warp *w, u64 passes);
void clock_global(Warp *w, const Ins *i, const u64 *sector, int n); /* sectors: addresses / 32 */
void clock_wgmma(Warp *w, const Ins *i);
void clock_wgmma_commit(Warp *w, u32 group);
void clock_wgmma_wait(Warp *w, u32 group);
void clock_tmem(Warp *w, u32 columns, bool store);
double clock_arrival(const Cta *cta);             /* when an arrival that happens now counts at an mbarrier of that CTA */
double clock_read(const Warp *w);                /* when the bulk copies so far have read their sources */
void clock_await(Warp *w, double read, double done, bool only_read); /* waits for a copy of a group */
double clock_copied(Warp *w);                    /* when a cp.async of the instruction at hand is done */
double clock_bulk(Warp *w, const Ins *i, u64 address, u64 bytes, bool store); /* when a piece of a bulk copy is done: of its row, if it has rows */
double clock_to_peer(Warp *w, const Ins *i, u64 bytes);        /* the same from CTA to CTA */
