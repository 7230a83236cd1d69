/* The machine that PTX runs on: its parts, and how an instruction reaches its operands.
 *
 * A launch is a grid of clusters of CTAs of warps of 32 lanes. A warp holds all its registers in one block of memory, register by
 * register: 32 lanes of 4 bytes (types up to 32 bits), of 8, of 16, or one 4-byte mask of lanes for a predicate.
 *
 * The engine has floors, and a file calls only files of lower ones (test_engine_floors.py reads this table):
 *     launch.c                                      the entry, and the table of all handlers
 *     clocked.c                                     which warp runs next: with a clock,
 *     schedule.c                                    and without one
 *     clusters.c                                    CTAs and warps, made and unmade
 *     loops.c                                       warps that spin for ever
 *     waits.c                                       what warps wait for
 *     warps.c tcgen05.c tma.c cancel.c              a warp's turn; families that use tensor memory or copies
 *     copies.c tmem.c                               copies; tensor memory
 *     barriers.c functions.c calls.c collectives.c  families: barriers, calls, what the lanes of a warp do together
 *     matrix.c wmma.c wgmma.c moves.c               families: matrices, and moves between registers
 *     memory.c control.c registers.c                loads, stores, atomics; which lanes run; registers that asynchronous work has
 *     mma.c sparse.c scalar.c                       products of tiles; the table of generated handlers
 *     visits.c products.c scalar_*.c                accesses to shared memory that its CTA's end waits for; the order of products in
 *                                                   tensor memory; generated handlers
 *     history.c work.c                              last accesses; asynchronous work
 *     knowledge.c clock.c                           who is ordered after whom; the time of all this, if it is asked for
 *     trace.c findings.c                            slices of time, if they are; what is wrong
 */
#pragma once
#include "instructions.h"

typedef struct Machine Machine;
typedef struct Cluster Cluster;
typedef struct Cta Cta;
typedef struct Split Split;
typedef struct Mbarrier Mbarrier;
typedef struct Work Work;       /* work.h */
typedef struct Granule Granule; /* history.h */
typedef struct Finding Finding; /* findings.h */
typedef struct Foreign Foreign; /* knowledge.h: what is known of other clusters' actors */
typedef struct Clock Clock;     /* clock.h: the time of a launch that is asked for it */
typedef struct Call Call;       /* control.h: a device function that runs */
typedef struct WarpTime WarpTime;
typedef struct ClockSetting ClockSetting;

/* ---- knowledge: who is ordered after what ------------------------------------------------------------------------------- */

/* An actor's accesses are numbered by its clock. Actors of a cluster: its warps; what each warp has sent off asynchronously, by
 * kind; its mbarriers, whose clock is the number of completed phases and which stand for the copies they track. */
typedef enum {
    BY_WARP, BY_CP_ASYNC, BY_BULK_WRITE, BY_BULK_READ, BY_WGMMA, BY_TENSOR, BY_TMEM, BY_TMEM_STORE,
    SENT_TO_TENSOR, /* no accesses of its own: how many operations of BY_TENSOR have been sent, done or not; an allocation counts as one */
    KINDS_OF_ACTOR
} ActorKind;

/* SEEN: accesses that happened before. FENCED_*: those also fenced towards the async proxy, in shared and in global memory. Of accesses to
 * tensor memory: BEFORE_SYNC, those ordered before the knower's next synchronisation (tcgen05.fence::before_thread_sync), and BEFORE_TENSOR,
 * those ordered before its next tcgen05 operation (its own that are done; others' by tcgen05.fence::after_thread_sync). The last view is
 * the knower's own: nothing hands it on. */
enum { SEEN, FENCED_SHARED, FENCED_GLOBAL, BEFORE_SYNC, VIEWS_HANDED_ON, BEFORE_TENSOR = VIEWS_HANDED_ON, VIEWS };
typedef struct {
    u32 *clock[VIEWS]; /* [view][actor] */
    u32 *met, *lanes;  /* for each warp: its clock up to which all of its lanes are spoken for, and the lanes that are beyond, up to SEEN */
    Foreign *foreign;
    bool grid_ahead;   /* what the grid ahead has done (griddepcontrol.wait) */
} Knowledge;

/* ---- counters: one record for each instruction of the program ----------------------------------------------------------- */

typedef struct {
    u64 issued, lanes;                  /* warps that ran it, lanes that took part */
    u64 global_read, global_written;    /* bytes asked of global memory */
    u64 sectors;                        /* 32-byte pieces of global memory touched by a warp's access */
    u64 wavefronts, wavefronts_needed;  /* passes over shared memory: taken, and without bank conflicts */
    u64 shared_read, shared_written;    /* bytes */
    u64 flops;                          /* by matrix instructions: two for a multiply-add */
} Counter;

/* ---- asynchronous work -------------------------------------------------------------------------------------------------- */

/* One queue for each CTA's tensor core; copies get queues of their own, because they may finish in any order. */
typedef struct Queue Queue;
struct Queue {
    Work *first, *last;
    Queue *next, *previous;
    Cluster *cluster;
    bool keep; /* stays when empty */
    double free_at; /* when the work before is done */
};

/* ---- warps -------------------------------------------------------------------------------------------------------------- */

/* Lanes that run together. Where a branch parts them they meet again at the branch's join. */
struct Split {
    s32 pc;
    u32 lanes;
    s32 join;    /* index into Warp.joins; -1: none */
    bool blocked, gathering;
    u64 seen;    /* Machine.events when it blocked */
    u64 ticket;  /* a blocking handler's note to itself; 0 when an instruction starts */
    u64 timeout; /* Machine.progress when its try_wait last gave up */
    s32 tried;   /* the try_wait that has just returned false, plus one; 0: none */
};

typedef struct {
    s32 pc, lands; /* where its lanes arrive, and where they go on: the same, but for a call, whose lanes return (pc -1) */
    s32 outer;
    u32 expected, arrived;
    bool open;
    Call *call;
} Join;

enum { MAX_SPLITS = 32 };

/* Groups that lanes have committed: how many, and the clocks of the newest (that of group n at n % GROUPS_KEPT). Groups are numbered from
 * 1: that of a lane's newest bulk copy, which `ins` started (0: it has sent none), and the newest group that it has waited for. */
enum { GROUPS_KEPT = 32 };
typedef struct {
    u32 committed[LANES], clock[LANES][GROUPS_KEPT];
    u32 sent[LANES], awaited[LANES];
    s32 ins[LANES];
} Groups;

struct Warp {
    Machine *machine;
    Cta *cta;
    Cluster *cluster;
    s32 index;      /* in the CTA */
    s32 actor;      /* index among the cluster's warps: the first of its actors */
    u8 *regs;
    u8 *local;      /* [lane][local_bytes] */
    u32 live;       /* lanes that have not exited */
    u32 born;       /* lanes that exist */
    Split split[MAX_SPLITS];
    s32 nsplits, current;
    Join *join;
    s32 njoins;     /* room for as many */
    Knowledge know;
    Knowledge released; /* at its last release fence: what a relaxed store publishes */
    Knowledge to_acquire; /* what relaxed loads have read: an acquire fence takes it in */
    bool has_released, has_to_acquire;
    u32 async_clock[KINDS_OF_ACTOR]; /* the last number given to work of that kind */
    u32 acting;     /* the lanes of the instruction that runs */
    u32 lanes_met;  /* its clock when all lanes last met: what they had done by then is ordered before what each of them does */
    u32 (*met)[LANES]; /* [lane][other lane]: the same of those that met without the others; NULL: none have */
    Groups cp_async, bulk; /* copies.c */
    u64 issued;
    s32 nin_flight;     /* registers that asynchronous work has; one more where uses of registers are watched (registers.c) */
    s32 max_registers;  /* setmaxnreg */
    Mbarrier *unfenced; /* those that it has initialised since its last fence for them */
    u32 cluster_here;   /* lanes that have arrived for the generation of barrier.cluster that is under way */
    u32 cluster_owed;   /* lanes that have arrived for some generation, and not waited yet */
    u32 cluster_clock;  /* its clock then */
    void *registers;    /* owned by registers.c */
    void *wgmma;        /* owned by wgmma.c */
    void *seen;         /* owned by loops.c */
    WarpTime *time;     /* NULL without a clock */
};

enum { NAMED_BARRIERS = 16, MOST_WARPS = 32 };
typedef struct {
    bool begun;       /* lanes have come in this generation, */
    bool reducing;    /* with bar.red */
    u32 arrived;      /* threads of whole warps */
    u32 expected;     /* threads; 0: all */
    u32 waiting[MOST_WARPS]; /* lanes of a warp that have come, while others of it have not */
    u64 generation;
    u64 ahead;        /* bit for each warp that has run bar.arrive in this generation, and did not wait */
    u32 reduced, reduced_last; /* bar.red */
    Knowledge gathering, done;
    s32 ins;
    double begun_at, done_at; /* when the first of them arrived, and the last */
} NamedBarrier;

struct Mbarrier {
    bool live;
    u32 address; /* offset in its CTA */
    Cta *cta;
    u64 phase;   /* completed phases */
    s64 expected, pending, tx;
    s32 actor;   /* its index in clocks */
    s32 ins;     /* the instruction that initialised it */
    bool from_other_cta; /* threads of another CTA have arrived */
    Warp *by;    /* the warp that did so, */
    u32 fenced[2]; /* and its clock at the fence that followed, 0: none yet; [0] for the async proxy, [1] for other CTAs */
    Mbarrier *next_unfenced;
    Knowledge arriving, done;
    double arrived_at, done_at; /* the latest arrival of the current phase; when the phase before ended */
};

struct Cta {
    Machine *machine;
    Cluster *cluster;
    s32 rank;            /* in the cluster */
    u32 id[3];           /* %ctaid */
    u64 linear;          /* ctaid as one number */
    Warp *warp;
    s32 nwarps, running; /* warps that still have live lanes */
    u8 *shared;          /* [shared_base, shared_end) is the CTA's */
    Granule *shared_history;
    Mbarrier **mbarrier; /* [offset / 8] */
    NamedBarrier barrier[NAMED_BARRIERS];
    Queue *tensor_queue;
    void *tmem;          /* owned by tmem.c */
    void *visits;        /* owned by visits.c */
    s32 register_pool;
    bool exited, triggered; /* triggered: has run griddepcontrol.launch_dependents */
};

struct Cluster {
    Machine *machine;
    u32 serial;          /* 1, 2, ... */
    u32 id[3];
    Cta *cta;
    s32 nctas, nwarps;
    s32 width, capacity; /* actors in use, and room in clocks */
    s32 running;         /* CTAs that still run */
    u64 pending_work;
    u64 generation; /* how often barrier.cluster was completed */
    Knowledge gathering, done;
    double done_at;      /* when the last warp arrived at barrier.cluster */
    double ends_at;      /* when the latest of its work so far was done */
    s32 slot;            /* where it runs: on the first, second, ... SM, or SMs of a cluster; with a clock, of those in detail */
    bool apart;          /* it has moved to SMs that no other cluster is on (tmem.c) */
    Queue queues;        /* head of the ring of its queues */
    void *spare;         /* memory of Knowledge that nobody has any more: each piece begins with a pointer to the next */
    Cluster *next;
};

typedef struct {
    u64 address, size;
    u8 *host;       /* where the bytes are */
    Granule **pages; /* pages for PAGE bytes, made when first touched */
    u8 *touched;    /* for each 32-byte sector: 1 read, 2 written */
    const u8 *ahead; /* for each byte, what grids do that may still run: AHEAD_*; NULL: there are none */
    u8 *left;       /* the same of this grid, for the next one; NULL: that begins when this one has ended */
    u8 *written;    /* for each byte, whether anything has written it; NULL: all of them were */
    s32 writable, label;
} Region;
enum { PAGE = 4096, AHEAD_READS = 1, AHEAD_WRITES = 2 };
#define GRID_AHEAD 0xffffu /* in the place of an actor: serial 0 is no cluster's */

/* ---- the launch --------------------------------------------------------------------------------------------------------- */

/* Python fills the first part and reads the second. */
typedef struct {
    const Program *program;
    u32 grid[3], block[3], cluster[3];
    u32 arch;              /* 80, 86, 89, 90, 100, 103, 110, 120, 121 */
    u32 shared_base;       /* first byte of shared memory that a CTA may use */
    u32 shared_end;        /* static + dynamic, from address 0 */
    const u8 *params;
    u32 params_size;
    u32 sms;
    u32 clusters_sm;       /* clusters that fit side by side on the SMs of one */
    Region *regions;       /* sorted by address */
    s32 nregions;
    u32 early;             /* asynchronous work runs at once */
    u32 checks;            /* keep histories */
    u32 strict;            /* hold nothing that hardware and compilers tolerate: products pass others as the manual allows */
    u32 resident;          /* clusters that run side by side */
    u64 seed;              /* 0: round robin */
    u64 quantum;           /* instructions a warp runs before the next one's turn */
    u64 limit;             /* warp-instructions in all */
    u64 fatal;             /* kinds of findings that end the launch, a bit each */
    s32 max_registers;     /* a thread has at the start; 0: unknown */
    s32 max_findings;
    /* results */
    Finding *findings;
    s32 nfindings;
    s32 stopped;           /* the finding that ended the launch, from 1 on; -1: one that there was no room for; 0: none did */
    Counter *counters;
    u64 issued, launched_clusters, async_work, barrier_waits;
    u64 tmem_columns;      /* most that were allocated at once on an SM */
    s32 triggered;         /* griddepcontrol.launch_dependents has run; TRIGGERED_EARLY: while grids ahead may still run */
    s32 newest;            /* the finding that was there last, or again, from 1 on */
    ClockSetting *clock;   /* NULL: nobody asks for the time */
} Launch;
enum { TRIGGERED = 1, TRIGGERED_EARLY = 2 };

struct Machine {
    Launch *launch;
    const Program *program;
    Cluster *clusters;  /* resident */
    u64 next_cluster, total_clusters;
    u64 events;   /* grows whenever something may have unblocked someone */
    u64 progress; /* grows whenever memory or a barrier changed */
    u64 meetings; /* how much of that was bar.sync and bar.arrive, which tell a warp nothing */
    u64 random;
    u64 ran;       /* warp instructions */
    u64 last_work; /* how many had run when asynchronous work last did */
    u64 work_changes; /* grows when work is sent off, and when it runs */
    void *sync_variables; /* history.c: what was published at an address */
    void *cancel;  /* clusterlaunchcontrol */
    const Ins *default_scope; /* the first one that relies on .cta being enough between CTAs; NULL: none has */
    Clock *time;
};

/* ---- registers, and what everybody asks of the machine ------------------------------------------------------------------- */

static inline u32 *R32(const Warp *w, s32 offset) { return (u32 *)(w->regs + offset); }
static inline u64 *R64(const Warp *w, s32 offset) { return (u64 *)(w->regs + offset); }
static inline u32 *PRED(const Warp *w, s32 offset) { return (u32 *)(w->regs + offset); } /* one mask of lanes */
/* An address operand: register arg[k], and the fields of ADDRESS from mod[m] on. */
static inline u64 address_operand(const Warp *w, const Ins *i, int k, int m, int l) {
    return (i->mod[m + ADDRESS_WIDE] ? R64(w, i->arg[k])[l] : R32(w, i->arg[k])[l]) + (u64)i->mod[m + ADDRESS_OFFSET];
}
static inline bool lane_in(u32 lanes, int l) { return lanes >> l & 1; }
static inline int first_lane(u32 lanes) { return __builtin_ctz(lanes); }

/* The body runs for each lane l of a mask; the full mask gets a loop of its own, which vectorises. */
#define EACH_LANE(lanes, body)                                  \
    do {                                                        \
        if ((lanes) == FULL) {                                  \
            for (int l = 0; l < LANES; l++) body                \
        } else {                                                \
            for (u32 rest_ = (lanes); rest_; rest_ &= rest_ - 1) { \
                const int l = __builtin_ctz(rest_);             \
                body                                            \
            }                                                   \
        }                                                       \
    } while (0)

static inline void set_pred(Warp *w, s32 offset, u32 lanes, u32 bits) {
    if (offset < 0) return;
    u32 *p = PRED(w, offset);
    *p = (*p & ~lanes) | (bits & lanes);
}

static inline Counter *counter(const Warp *w, const Ins *i) { return &w->machine->launch->counters[i->index]; }
static inline Split *current_split(Warp *w) { return &w->split[w->current]; }

/* Returns for how many of `count` sorted things a condition holds: `holds` is the condition for number n; it is true up to one of them. */
#define HOW_MANY(count, holds)                                  \
    ({                                                          \
        s32 low_ = 0, high_ = (count);                          \
        while (low_ < high_) {                                  \
            const s32 n = (low_ + high_) / 2;                   \
            if (holds)                                          \
                low_ = n + 1;                                   \
            else                                                \
                high_ = n;                                      \
        }                                                       \
        low_;                                                   \
    })

static inline Region *region_at(const Launch *launch, u64 address) { /* the last region that starts at or before it */
    const s32 begun = HOW_MANY(launch->nregions, launch->regions[n].address <= address);
    return begun ? &launch->regions[begun - 1] : NULL;
}

static inline u32 mbarrier_next_clock(const Mbarrier *b) { return (u32)b->phase + 1; } /* of accesses that its current phase tracks */

static inline Warp *warp_after(const Machine *m, Warp *w) { /* through all resident clusters, from NULL to NULL */
    const Cluster *c = w ? w->cluster : NULL;
    if (w && w->index + 1 < w->cta->nwarps) return w + 1;
    if (w && w->cta->rank + 1 < c->nctas) return c->cta[w->cta->rank + 1].warp;
    c = c ? c->next : m->clusters;
    return c ? c->cta[0].warp : NULL;
}

static inline void machine_event(Machine *m) { /* something may have unblocked someone */
    m->events++;
    m->progress++;
}

static inline u64 machine_random(Machine *m) {
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return m->random;
}
