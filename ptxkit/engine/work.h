/* Asynchronous work: what instructions have sent off and has not run yet. */
#pragma once
#include "machine.h"

/* Work that an instruction has sent off. It waits in a queue; the machine runs it as late as it may, or at once (Machine.early).
 * Within a queue work runs in order; queues are independent. */
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
    /* with a clock: when it was sent, has read its sources, will be done; finish 0: when its turn in the queue comes, it takes
     * `duration`, or as long as it reads `operands`, bytes of shared memory, and others hear of it `tail` later */
    double sent, read, finish, duration, operands, tail;
    u8 data[] __attribute__((aligned(16))); /* the family's own */
};

/* Sends work off: n bytes of the family's own data follow. queue == NULL: it may run in any order with other work. */
Work *send_work(Warp *w, const Ins *i, int lane, Queue *queue, void (*run)(Work *), size_t n);
/* Runs what a lane (or ALL) sent off in groups up to this one; the warp waits until that is done, or has read its sources. */
void run_groups(Warp *w, ActorKind kind, int lane, u32 clock, bool read);
Queue *new_queue(Cluster *c, bool keep);
void run_first(Queue *q); /* the first of what waits in it; a queue that does not stay is gone afterwards if it was the last */
void run_queue(Queue *q); /* all that waits in a queue that stays */
bool run_some_work(Machine *m); /* the first of a queue of any cluster, chosen by the schedule; false: none waits */
