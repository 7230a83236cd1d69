/* The machine that PTX runs on: its parts, and what every instruction family may ask of them.
 *
 * A launch is a grid of clusters of CTAs of warps of 32 lanes. A warp holds all its registers in one block of memory, register by
 * register: 32 lanes of 4 bytes (types up to 32 bits), of 8, of 16, or one 4-byte mask of lanes for a predicate. Immediates and
 * special registers lie in the same block, so that an operand is always an offset (Ins.arg). A handler runs one instruction for the
 * lanes of a mask and says how to go on (Outcome).
 *
 * files: warps.c control flow and the schedule; history.c who knows of whose accesses; memory.c loads, stores, atomics;
 * barriers.c bar, barrier.cluster, mbarrier, fences; one file for every other family.
 */
#pragma once
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

typedef struct Machine Machine;
typedef struct Cluster Cluster;
typedef struct Cta Cta;
typedef struct Warp Warp;
typedef struct Split Split;
typedef struct Ins Ins;
typedef struct Mbarrier Mbarrier;

/* ---- instructions ------------------------------------------------------------------------------------------------------- */

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
    const s64 *mod; /* numbers that the family defines: widths, spaces, flags */
    s32 nargs;
    s32 guard;  /* offset of the guard predicate; -1: always */
    s32 negate; /* the guard is @!p */
    s32 join;   /* a branch: the instruction where its lanes meet again; -1: at the exit */
    s32 gather; /* 0; 1: all live lanes of the warp must run it together (.aligned); 2: the lanes of operand mod[0] must (.sync) */
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
    u64 register_bytes; /* of one warp */
    u64 local_bytes;    /* of one thread */
    const ConstantRecord *constants;
    s32 nconstants;
    s32 *args;
    s64 *mods;
    Handler *handlers;
} Program;

/* ---- knowledge: who is ordered after what ------------------------------------------------------------------------------- */

/* An actor's accesses are numbered by its clock. Actors of a cluster: its warps; what each warp has sent off asynchronously, by
 * kind; its mbarriers, whose clock is the number of completed phases and which stand for the copies they track. */
typedef enum {
    BY_WARP, BY_CP_ASYNC, BY_BULK_WRITE, BY_BULK_READ, BY_WGMMA, BY_TENSOR, BY_TMEM, BY_TMEM_STORE,
    SENT_TO_TENSOR, /* no accesses of its own: how many operations of BY_TENSOR have been sent, done or not; an allocation counts as one */
    KINDS_OF_ACTOR
} ActorKind;

typedef struct Foreign Foreign; /* what is known of other clusters' actors */

/* SEEN: accesses that happened before. FENCED_*: those also fenced towards the async proxy, in shared and in global memory. Of accesses to
 * tensor memory: BEFORE_SYNC, those ordered before the knower's next synchronisation (tcgen05.fence::before_thread_sync), and BEFORE_TENSOR,
 * those ordered before its next tcgen05 operation (its own that are done; others' by tcgen05.fence::after_thread_sync). The last view is
 * the knower's own: nothing hands it on. */
enum { SEEN, FENCED_SHARED, FENCED_GLOBAL, BEFORE_SYNC, VIEWS_HANDED_ON, BEFORE_TENSOR = VIEWS_HANDED_ON, VIEWS };
typedef struct {
    u32 *clock[VIEWS]; /* [view][actor] */
    u32 *met, *lanes;  /* of a warp: its clock up to which all of its lanes are spoken for, and the lanes that are beyond, up to SEEN */
    Foreign *foreign;
    bool grid_ahead;   /* what the grid ahead has done (griddepcontrol.wait) */
} Knowledge;

typedef enum { SPACE_SHARED, SPACE_GLOBAL, SPACE_TMEM } HistorySpace;
typedef enum { WEAK, SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS } Scope; /* strong accesses carry a scope */

/* What the last writer and the readers since then left behind: one for each byte of memory, one for each 32-bit cell of TMEM. */
typedef struct {
    u32 writer, writer_clock; /* actor = cluster serial << 16 | index; clock 0: nobody yet */
    u32 reader, reader_clock; /* reader == MANY_READERS: reader_clock is the index of a set */
    u32 writer_ins, reader_ins;
    u8 writer_lane, reader_lane; /* reader_lane: or SEVERAL that have not met since */
    u8 writer_async, reader_async; /* reader_async: or REWRITES, a write of the value that was there */
    u8 writer_scope, reader_scope;
    u8 written; /* 1: by the program; 2: it was there before */
    u8 rewritten; /* somebody not ordered after the writer has written the same value */
} Cell;

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

/* ---- findings ----------------------------------------------------------------------------------------------------------- */

typedef enum {
    OUT_OF_BOUNDS = 1, MISALIGNED, UNINITIALISED, RACE_WRITE_WRITE, RACE_WRITE_READ, RACE_READ_WRITE, PROXY_RACE, LANE_RACE,
    BAD_BARRIER, BAD_MBARRIER, DEADLOCK, LIVELOCK, DIVERGED, BAD_LANE, TMEM_LEAK, TMEM_MISUSE, BAD_DESCRIPTOR, BAD_TENSOR_MAP,
    BAD_OPERAND, PEER_EXITED, REGISTER_IN_FLIGHT, GROUP_MISUSE, MBARRIER_OVERWRITTEN, TOO_MANY_INSTRUCTIONS, UNSUPPORTED,
    TENSOR_UNFENCED, MBARRIER_UNFENCED, LANES_APART, REGISTER_UNFENCED, GRIDS_RACE,
} FindingKind;

typedef struct {
    s32 kind, ins, other_ins, cta, warp, lane, other_actor, space;
    u64 address, size, count; /* count: how often; the first place is kept */
    s64 detail[4];            /* what a kind's wording asks for */
    char text[160];           /* what was found, in words; may be empty */
} Finding;

/* ---- counters: one record for each instruction of the program ----------------------------------------------------------- */

typedef struct {
    u64 issued, lanes;                  /* warps that ran it, lanes that took part */
    u64 global_read, global_written;    /* bytes asked of global memory */
    u64 sectors;                        /* 32-byte pieces of global memory touched by a warp's access */
    u64 wavefronts, wavefronts_needed;  /* passes over shared memory: taken, and without bank conflicts */
    u64 shared_read, shared_written;    /* bytes */
    u64 flops;                          /* of matrix instructions: two for a multiply-add */
} Counter;

/* ---- asynchronous work -------------------------------------------------------------------------------------------------- */

/* Work that an instruction has sent off. It waits in a queue; the machine runs it as late as it may, or at once (Machine.early).
 * Within a queue work runs in order; queues are independent. */
typedef struct Work Work;
struct Work {
    void (*run)(Work *work);
    Work *next;
    Warp *warp;      /* who sent it off (kept alive as long as its cluster) */
    const Ins *ins;
    Knowledge know;  /* what the sender knew */
    ActorKind kind;  /* whose clock the accesses are left under: a group of its warp's, or BY_TENSOR's own count */
    u32 clock;
    u32 lanes;       /* who sent it off; one piece of work if several lanes ask for the same */
    u8 lane;         /* the first of them */
    u8 data[] __attribute__((aligned(16))); /* the family's own */
};

/* One queue for each CTA's tensor core; copies get queues of their own, because they may finish in any order. */
typedef struct Queue Queue;
struct Queue {
    Work *first, *last;
    Queue *next, *previous;
    Cluster *cluster;
    bool keep; /* stays when empty */
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
    s32 pc, outer;
    u32 expected, arrived;
    bool open;
} Join;

enum { MAX_SPLITS = 32, MAX_JOINS = 64 };

/* Groups that lanes have committed: how many, and the clocks of the newest (that of group n at n % GROUPS_KEPT). */
enum { GROUPS_KEPT = 32 };
typedef struct {
    u32 committed[LANES], clock[LANES][GROUPS_KEPT];
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
    Join join[MAX_JOINS];
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
    s32 nin_flight;     /* registers that asynchronous work has; one more where uses of registers are watched (wgmma.c) */
    s32 max_registers;  /* setmaxnreg */
    Mbarrier *unfenced; /* those that it has initialised since its last fence for them */
    u64 cluster_ticket; /* the generation of barrier.cluster that it has arrived for, plus one; 0: has not */
    u32 cluster_clock;  /* its clock then */
    void *wgmma;        /* owned by wgmma.c */
};

enum { NAMED_BARRIERS = 16 };
typedef struct {
    u32 arrived;      /* threads */
    u32 expected;     /* threads; 0: idle */
    u64 generation;
    u64 arrived_warps; /* bit for each warp that has arrived in this generation */
    u32 reduced, reduced_last; /* bar.red */
    Knowledge gathering, done;
    s32 ins;
} NamedBarrier;

struct Mbarrier {
    bool live;
    u32 address; /* offset in its CTA */
    Cta *cta;
    u64 phase;   /* completed phases */
    s64 expected, pending, tx;
    s32 actor;   /* its index in clocks */
    s32 ins;     /* that initialised it */
    Warp *by;    /* that did so, */
    u32 fenced[2]; /* and its clock at the fence that followed, 0: none yet; [0] for the async proxy, [1] for other CTAs */
    Mbarrier *next_unfenced;
    Knowledge arriving, done;
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
    Cell *shared_history;
    Mbarrier **mbarrier; /* by offset / 8 */
    NamedBarrier barrier[NAMED_BARRIERS];
    Queue *tensor_queue;
    void *tmem;          /* owned by tmem.c */
    s32 register_pool;
    bool exited;
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
    u64 generation; /* of barrier.cluster */
    Knowledge gathering, done;
    Queue queues;        /* head of the ring of its queues */
    void *spare;         /* memory of Knowledge that nobody has any more: each piece begins with a pointer to the next */
    Cluster *next;
};

typedef struct {
    u64 address, size;
    u8 *host;       /* where the bytes are */
    Cell **pages;   /* of PAGE cells, made when first touched */
    u8 *touched;    /* for each 32-byte sector: 1 read, 2 written */
    const u8 *ahead; /* for each byte, what grids do that may still run: AHEAD_*; NULL: there are none */
    u8 *left;       /* the same of this grid, for the next one; NULL: that begins when this one has ended */
    s32 writable, label;
} Region;
enum { PAGE = 4096, AHEAD_READS = 1, AHEAD_WRITES = 2 };
#define GRID_AHEAD 0xffffu /* in the place of an actor: serial 0 is no cluster's */

/* ---- the launch --------------------------------------------------------------------------------------------------------- */

/* Python fills the first part and reads the second. */
typedef struct {
    const Program *program;
    u32 grid[3], block[3], cluster[3];
    u32 arch;              /* 80, 89, 90, 100, 103 */
    u32 shared_base;       /* first byte of shared memory that a CTA may use */
    u32 shared_end;        /* static + dynamic, from address 0 */
    const u8 *params;
    u32 params_size;
    u32 sms;
    Region *regions;       /* sorted by address */
    s32 nregions;
    u32 early;             /* asynchronous work runs at once */
    u32 checks;            /* keep histories */
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
    s32 stopped;           /* a finding ended the launch */
    Counter *counters;
    u64 issued, launched_clusters, async_work, barrier_waits;
    u64 tmem_columns;      /* most that were allocated at once in a CTA */
    s32 triggered;         /* griddepcontrol.launch_dependents has run; TRIGGERED_EARLY: while grids ahead may still run */
    s32 padding;
} Launch;
enum { TRIGGERED = 1, TRIGGERED_EARLY = 2 };

struct Machine {
    Launch *launch;
    const Program *program;
    Cluster *clusters;  /* resident */
    u64 next_cluster, total_clusters;
    u64 events;   /* grows whenever something may have unblocked someone */
    u64 progress; /* grows whenever memory or a barrier changed */
    u64 random;
    u64 clock;
    u64 last_work; /* clock when asynchronous work last ran */
    void *sync_variables; /* history.c: what was published at an address */
    void *cancel;  /* clusterlaunchcontrol */
};

/* ---- asked of each other ------------------------------------------------------------------------------------------------ */

static inline u32 *R32(const Warp *w, s32 offset) { return (u32 *)(w->regs + offset); }
static inline u64 *R64(const Warp *w, s32 offset) { return (u64 *)(w->regs + offset); }
static inline u32 *PRED(const Warp *w, s32 offset) { return (u32 *)(w->regs + offset); } /* one mask of lanes */
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

/* warps.c */
u64 machine_random(Machine *m);
void machine_event(Machine *m); /* something may have unblocked someone */
static inline Counter *counter(const Warp *w, const Ins *i) { return &w->machine->launch->counters[i->index]; }
static inline Split *current_split(Warp *w) { return &w->split[w->current]; }
/* Sends work off: n bytes of the family's own data follow. queue == NULL: it may run in any order with other work. */
Work *send_work(Warp *w, const Ins *i, int lane, Queue *queue, void (*run)(Work *), size_t n);
void run_groups(Warp *w, ActorKind kind, int lane, u32 clock); /* runs what a lane (or ALL) sent off in groups up to this one */
Queue *new_queue(Cluster *c, bool keep);
void run_queue(Queue *q); /* all that waits in a queue that stays */

/* findings: the first of its kind at a pair of instructions is kept, the others are counted. */
Finding *find_at(Machine *m, FindingKind kind, const Warp *w, int lane, s32 ins, s32 other_ins, u64 address, u64 size);
Finding *find(Warp *w, const Ins *i, int lane, FindingKind kind, u64 address, u64 size, const char *format, ...)
    __attribute__((format(printf, 7, 8)));
void stop(Machine *m); /* after a finding with which going on makes no sense */

/* history.c */
Knowledge new_knowledge(Cluster *c);
void free_knowledge(Cluster *c, Knowledge *k);
void free_spare_knowledge(Cluster *c);
void learn(Cluster *c, Knowledge *k, const Knowledge *from);       /* k := join(k, from) */
void copy_knowledge(Cluster *c, Knowledge *k, const Knowledge *from);
static inline u32 actor_of(const Warp *w, ActorKind kind) { return (w->cluster->serial & 0xffff) << 16 | (kind * w->cluster->nwarps + w->actor); }
static inline u32 warp_clock(const Warp *w) { return w->know.clock[SEEN][w->actor]; }
void lanes_meet(Warp *w, u32 lanes);                               /* bar.warp.sync, or a barrier: memory between them is ordered */
void speak_for_lanes(Warp *w);                                     /* w->know says what its acting lanes release */
void tick(Warp *w);                                                /* its later accesses are not covered by what it knew until now */
void release_to(Warp *w, Knowledge *object);                       /* object learns what the warp knows; the warp ticks */
void acquire_from(Warp *w, const Knowledge *object);
void knows_of(Knowledge *k, u32 actor, u32 clock);                 /* of the knower's own cluster: completed asynchronous work */
void fence_view(const Cluster *c, Knowledge *k, int view, int from); /* view := join(view, from) */
Access warp_access(Warp *w, const Ins *i, int lane, HistorySpace space); /* a generic, weak access of the warp */
Access work_access(Work *work, u32 actor, u32 clock, HistorySpace space); /* an access of the async proxy, for what the sender knew */
void history_read(Cell *cell, u64 n, const Access *a, u64 address);
void history_write(Cell *cell, u64 n, const Access *a, u64 address, const u8 *old_value, const u8 *new_value);
void publish(Warp *w, u64 key, bool release, bool keep);            /* a strong write; keep: an atomic goes on the sequence before it */
void observe(Warp *w, u64 key, bool acquire);                       /* a strong read */
void fence_release(Warp *w);
void fence_acquire(Warp *w);
void free_sync_variables(Machine *m);

void note_grid_ahead(Region *r, u64 page);                          /* into a page of cells that is new */
void note_left(Region *r);                                          /* out of all its pages */

/* memory.c: an address in its space, or NULL after a finding */
enum { WINDOW_SHARED = 0x02, WINDOW_LOCAL = 0x03, WINDOW_PARAM = 0x04 }; /* top byte of generic addresses; 0: global */
static inline u64 window(int top) { return (u64)top << 56; }
Cta *cta_at(Cluster *c, u32 shared_address); /* by the rank in bits 24-31; NULL: no such CTA */
static inline u32 shared_address(const Cta *cta, u32 offset) { return (cta->machine->launch->arch >= 90 ? (u32)cta->rank << 24 : 0) | offset; }
/* n bytes of shared memory at a 32-bit cluster address: the pointer, with the CTA and offset in *cta, *offset */
u8 *shared_bytes(Warp *w, const Ins *i, int lane, u32 address, u64 n, u64 align, Cta **cta, u32 *offset);
u8 *global_bytes(Warp *w, const Ins *i, int lane, u64 address, u64 n, u64 align, bool write, Region **region);
/* the same, with the history kept: read copies to `to`; write copies from `from` */
bool shared_read(Warp *w, const Ins *i, const Access *a, u32 address, void *to, u64 n, u64 align);
bool shared_write(Warp *w, const Ins *i, const Access *a, u32 address, const void *from, u64 n, u64 align);
bool global_read(Warp *w, const Ins *i, const Access *a, u64 address, void *to, u64 n, u64 align);
bool global_write(Warp *w, const Ins *i, const Access *a, u64 address, const void *from, u64 n, u64 align);
void region_history(Region *r, u64 offset, u64 n, const Access *a, const u8 *old_value, const u8 *new_value, bool write);
const u8 *param_bytes(Warp *w, u64 offset, u64 n);
/* atomics and reductions: one element; f32 addition flushes subnormals only where the caller says so (ftz) */
typedef enum { AT_ADD, AT_MIN, AT_MAX, AT_AND, AT_OR, AT_XOR, AT_EXCH, AT_CAS, AT_INC, AT_DEC } AtomicOp;
typedef enum { T_U32, T_S32, T_U64, T_S64, T_F32, T_F64, T_F16, T_BF16, T_B16, T_B128, T_F16X2, T_BF16X2 } AtomicType;
void combine(AtomicOp op, AtomicType t, const u8 *old, const u8 *x, u8 *result, bool ftz);
/* shared-memory passes of a warp's access: lanes' 32-bit addresses, bytes a lane */
void count_wavefronts(Warp *w, const Ins *i, u32 lanes, const u32 *address, u32 bytes, bool write);
void count_sectors(Warp *w, const Ins *i, u32 lanes, const u64 *address, u32 bytes);

/* barriers.c */
Mbarrier *mbarrier_at(Warp *w, const Ins *i, int lane, u32 address, bool must_live); /* finding if there is none */
void mbarrier_arrive(Mbarrier *b, u32 count, const Knowledge *from);                 /* from may be NULL (relaxed) */
void mbarrier_complete_tx(Mbarrier *b, s64 bytes, const Knowledge *from);
/* A finding if a copy or a commit, or another CTA than its own, knows of no fence behind its initialisation. */
void mbarrier_fenced(const Mbarrier *b, Warp *w, const Ins *i, int lane, const Knowledge *know);
u32 mbarrier_next_clock(const Mbarrier *b); /* the clock of accesses that its current phase tracks */
void free_cta_barriers(Cta *cta);

/* hooks of families that own state */
void tmem_at_exit(Cta *cta);  /* tmem.c: leaks, and frees */
void tmem_load_used(Warp *w, u32 clock); /* tmem.c: a register that the tcgen05.ld of that clock loads is used: it has completed */
bool tmem_explain_block(Warp *w, const Ins *i, char *text, size_t size); /* tmem.c: false if the instruction is none of its own */
void wgmma_at_exit(Warp *w);  /* wgmma.c */
void registers_touched(Warp *w, const Ins *i); /* wgmma.c: an instruction uses registers while some are in flight */
/* wgmma.c: asynchronous work has these registers until its clock is removed */
void in_flight_add(Warp *w, const s32 *offsets, s32 count, s32 bytes, ActorKind kind, s32 ins, u32 clock);
void in_flight_remove(Warp *w, ActorKind kind, u32 clock);
