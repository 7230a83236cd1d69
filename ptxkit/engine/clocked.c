/* The schedule with a clock: who is earliest goes first, a warp or the end of some asynchronous work.
 *
 * The first clusters of the grid run in detail, in slots (an SM, or the SMs of a cluster): so many at once in each, the next one when
 * one has ended. A warp that waits asks again after any event, at that event's time. What is asked for is the time alone: all bits are those of
 * any other schedule.
 */
#include "clocked.h"
#include "clock.h"
#include "clusters.h"
#include "loops.h"
#include "schedule.h"
#include "waits.h"
#include "warps.h"
#include "work.h"

#include <math.h>

/* ---- asynchronous work -------------------------------------------------------------------------------------------------- */

static void begin_in_turn(Queue *q, const Clock *c) { /* the first of a queue whose work runs one after the other, or that nobody gave a time */
    Work *work = q->first;
    if (!q->keep) {
        work->finish = work->sent + c->p->async_latency;
        return;
    }
    double begins = work->sent > q->free_at ? work->sent : q->free_at;
    q->free_at = begins + work->duration;
    if (work->operands) q->free_at = fmax(q->free_at, clock_operands(work->warp, begins, work->operands));
    work->finish = q->free_at + work->tail;
    sm_of(work->warp)->tcgen05.busy += q->free_at - begins;
    trace_warp(work->warp, TRACE_TCGEN05, work->ins->index, 0, begins, q->free_at);
}

typedef struct {
    Queue *queue;   /* NULL: none waits */
    double finish;  /* when its first work is done; without one, never */
    u64 changes;    /* Machine.work_changes then */
} Next;

static void find_next(const Machine *m, Next *next) {
    if (next->changes == m->work_changes) return;
    *next = (Next){.finish = INFINITY, .changes = m->work_changes};
    for (Cluster *c = m->clusters; c; c = c->next)
        for (Queue *q = c->queues.next; q != &c->queues; q = q->next) {
            if (!q->first) continue;
            if (!q->first->finish) begin_in_turn(q, m->time);
            if (q->first->finish < next->finish) next->finish = q->first->finish, next->queue = q;
        }
}

static void run_next(Machine *m, const Next *next) {
    Clock *c = m->time;
    if (next->finish > c->now) c->now = next->finish;
    c->acting = NULL;
    run_first(next->queue);
}

/* ---- warps -------------------------------------------------------------------------------------------------------------- */

static void run_one(Warp *w) {
    u64 before = w->machine->ran;
    run_warp(w, 1);
    w->machine->launch->issued += w->machine->ran - before;
    if (w->time->now > w->cluster->ends_at) w->cluster->ends_at = w->time->now;
    if (!w->nsplits && w->born) {
        if (w->time->bulk_end > w->cluster->ends_at) w->cluster->ends_at = w->time->bulk_end;
        retire(w);
    }
}

static void ask_again(Machine *m) { /* whoever waits */
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w))
        for (s32 k = 0; k < w->nsplits; k++) {
            const Split *s = &w->split[k];
            if (!s->blocked || s->gathering || s->seen == m->events) continue;
            w->current = k;
            run_one(w);
        }
}

static const Ins *at_hand(Warp *w) { return &w->machine->program->ins[current_split(w)->pc]; }

static Warp *earliest(Machine *m, double *second) { /* the earliest that can run; `second`: when the one after it can */
    Warp *first = NULL;
    *second = INFINITY;
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w)) {
        if (!w->nsplits || !pick_split(w)) continue;
        if (!first || w->time->now < first->time->now) {
            if (first) *second = first->time->now;
            first = w;
        } else if (w->time->now < *second)
            *second = w->time->now;
    }
    return first;
}

static bool past_limit(const Launch *launch) { return launch->limit && launch->issued > launch->limit; }

/* Runs while nobody else is earlier; what has moved its time goes back to the queue. A warp that nobody else waits for would never come back
 * from an endless loop: its turn ends after LONGEST instructions, so that somebody looks whether it spins. */
static void run_turn(Warp *w, double until) {
    enum { LONGEST = 1 << 16 };
    Machine *m = w->machine;
    u64 events = m->events, changes = m->work_changes, began = m->ran;
    do run_one(w);
    while (w->nsplits && !current_split(w)->blocked && !current_split(w)->gathering && w->time->now <= until && events == m->events &&
           changes == m->work_changes && m->ran - began < LONGEST && !m->launch->stopped && !past_limit(m->launch) &&
           clock_settled(w, at_hand(w)));
    note_turn(w);
}

/* ---- clusters ----------------------------------------------------------------------------------------------------------- */

static u64 resident(const Machine *m, s32 slot) {
    u64 n = 0;
    for (const Cluster *c = m->clusters; c; c = c->next) n += c->slot == slot;
    return n;
}

static s32 emptiest_slot(const Machine *m) {
    s32 found = 0;
    for (s32 slot = 1; slot < (s32)m->time->p->slots; slot++)
        if (resident(m, slot) < resident(m, found)) found = slot;
    return found;
}

static void begin_cluster(Machine *m) {
    const ClockSetting *p = m->time->p;
    m->time->next_slot = emptiest_slot(m);
    add_cluster(m);
    if (m->next_cluster <= p->detailed) p->begun[m->next_cluster - 1] = m->time->now;
}

/* Warps spin, or wait, for what none of them will do: all clusters run in detail now, and more at once, twice as many as there are. */
static bool begin_others(Machine *m, u64 all) {
    u64 begins = 0;
    m->total_clusters = all;
    for (const Cluster *c = m->clusters; c; c = c->next) begins++;
    if (begins > all - m->next_cluster) begins = all - m->next_cluster;
    for (u64 n = 0; n < begins; n++) begin_cluster(m);
    return begins;
}

static void end_clusters(Machine *m) { /* takes out those whose warps and asynchronous work have ended */
    ClockSetting *p = m->time->p;
    for (Cluster **link = &m->clusters; *link;) {
        Cluster *c = *link;
        if (c->running || c->pending_work) {
            link = &c->next;
            continue;
        }
        *link = c->next;
        if (c->ends_at > p->end) p->end = c->ends_at;
        if (c->serial <= p->detailed) p->ended[c->serial - 1] = c->ends_at;
        end_cluster(c);
        m->progress++;
    }
}

/* ---- the schedule ------------------------------------------------------------------------------------------------------- */

/* Do warps wait, by asking again and again, for a cluster that has not begun? Then nothing has changed for long; or, as who asks may write, too,
 * the clusters that have begun have run far more than they need. */
typedef struct {
    u64 progress, since; /* Machine.progress, and how many instructions had run when it last grew */
    u64 looked;          /* how many had run when this last said yes */
} Watch;

static bool spinning(const Machine *m, Watch *watch) {
    enum { QUIET = 1 << 18, ALONE = 1 << 20 };
    u64 from = m->last_work > watch->looked ? m->last_work : watch->looked;
    if (m->progress != watch->progress) watch->progress = m->progress, watch->since = m->ran;
    if (m->ran - from <= QUIET) return false;
    if (m->ran - watch->since <= QUIET && m->ran - from <= m->next_cluster * ALONE) return false;
    watch->looked = m->ran;
    return true;
}

static bool run_event(Machine *m, Next *next) { /* the earliest; false: nobody can go on */
    double second;
    Warp *w = earliest(m, &second);
    find_next(m, next);
    if (next->queue && (!w || next->finish <= w->time->now)) {
        run_next(m, next);
        return true;
    }
    if (!w) return false;
    if (current_split(w)->blocked || clock_settled(w, at_hand(w))) run_turn(w, second < next->finish ? second : next->finish);
    return true;
}

void run_clocked(Machine *m) {
    Launch *launch = m->launch;
    m->time = new_clock(m);
    const ClockSetting *p = m->time->p;
    u64 all = m->total_clusters, events = 0;
    Watch watch = {0};
    Next next = {.finish = INFINITY, .changes = (u64)-1};
    m->total_clusters = p->detailed < all ? p->detailed : all;
    while (!launch->stopped) {
        while (m->next_cluster < m->total_clusters && resident(m, emptiest_slot(m)) < p->resident) begin_cluster(m);
        if (!m->clusters) break;
        if (events != m->events) {
            events = m->events;
            ask_again(m);
            end_clusters(m);
            continue;
        }
        bool asks = spinning(m, &watch);
        if (!asks && run_event(m, &next)) {
            if (past_limit(launch)) report_limit(m);
            continue;
        }
        if (begin_others(m, all)) continue;
        if (asks && !spins_for_ever(m)) continue;
        if (give_up_a_wait(m)) continue;
        if (asks)
            report_livelock(m);
        else
            report_deadlock(m);
    }
    m->total_clusters = p->alone ? m->next_cluster : all;
    for (Cluster *c = m->clusters; c; c = m->clusters) { /* after a finding that ends the launch */
        m->clusters = c->next;
        end_cluster(c);
    }
    free_clock(m);
}
