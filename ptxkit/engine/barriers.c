/* Barriers and fences: bar (16 named barriers of a CTA), barrier.cluster, mbarrier, fence, griddepcontrol, setmaxnreg.
 *
 * All but mbarrier count warps: a warp arrives when all its live lanes have come, together (Ins.gather == 1) or one after the other.
 * Whoever arrives gives what it knows; whoever waits takes what all arrivals gave. An mbarrier's phase ends when its pending arrivals and its pending bytes are both
 * zero; its clock then stands for the copies that the phase tracked.
 */
#include "barriers.h"
#include "clock.h"
#include "control.h"
#include "findings.h"
#include "knowledge.h"
#include "memory.h"
#include "visits.h"

#include <stdio.h>

/* ---- bar ---------------------------------------------------------------------------------------------------------------- */

typedef enum { BAR_SYNC, BAR_ARRIVE, BAR_POPC, BAR_AND, BAR_OR } BarOp;

static u32 live_threads(const Cta *cta) { /* a warp with live lanes counts as 32 threads */
    u32 n = 0;
    for (s32 k = 0; k < cta->nwarps; k++) n += cta->warp[k].live ? LANES : 0;
    return n;
}

static void complete_bar(Cta *cta, NamedBarrier *b, bool meeting) {
    learn(cta->cluster, &b->done, &b->gathering);
    b->generation++;
    b->begun = false;
    b->arrived = 0;
    b->ahead = 0;
    b->reduced_last = b->reduced;
    b->done_at = time_of(cta->machine);
    trace_barrier(cta, TRACE_BARRIER, b->ins, (s32)(b - cta->barrier), b->begun_at, b->done_at);
    machine_event(cta->machine);
    cta->machine->meetings += meeting;
}

/* Lanes come to a barrier, which nothing forbids: their votes, if it reduces, and their warp's place in it. */
static void lanes_come(const Warp *w, NamedBarrier *b, const Ins *i, u32 lanes, u32 count) {
    BarOp op = i->mod[BAR_OP];
    u32 p = op >= BAR_POPC ? *PRED(w, i->arg[3]) & lanes : 0;
    u32 votes = op == BAR_POPC ? (u32)__builtin_popcount(p) : op == BAR_AND ? p == lanes : p != 0;
    b->reduced = !b->begun ? votes : op == BAR_POPC ? b->reduced + votes : op == BAR_AND ? b->reduced & votes : b->reduced | votes;
    if (!b->begun) b->begun_at = time_of(w->machine);
    b->begun = true;
    b->reducing = op >= BAR_POPC;
    b->expected = count;
    b->waiting[w->index] |= lanes;
    b->ins = i->index;
}

/* A warp arrives once all of its live lanes are here. */
static void arrive_if_whole(Warp *w, NamedBarrier *b, BarOp op, u32 lanes) {
    u32 *waiting = &b->waiting[w->index], whole = *waiting & w->live;
    if (!whole || w->live & ~whole) return;
    w->acting = whole;
    if (op != BAR_ARRIVE) lanes_meet(w, whole);
    release_to(w, &b->gathering);
    b->arrived += LANES;
    if (op == BAR_ARRIVE) b->ahead |= 1ull << w->index;
    *waiting = 0;
    w->machine->progress++;
    w->machine->meetings += op < BAR_POPC;
    if (whole != lanes) machine_event(w->machine); /* for its other parts, which wait */
}

static bool misuse(const Warp *w, const Ins *i, int l, u32 id, u32 count) {
    const NamedBarrier *b = &w->cta->barrier[id];
    BarOp op = i->mod[BAR_OP];
    if (op == BAR_ARRIVE && b->ahead >> w->index & 1)
        find(w, i, l, BAD_BARRIER, id, count, "warp %d runs bar.arrive twice at barrier %u before that completes: it is a round ahead", w->index, id);
    else if (b->begun && b->expected != count)
        find(w, i, l, BAD_BARRIER, id, count, "barrier %u is used with counts %u and %u at once", id, b->expected, count);
    else if (b->begun && b->reducing != (op >= BAR_POPC))
        find(w, i, l, BAD_BARRIER, id, count, "barrier %u is used by bar.red and by bar.sync or bar.arrive at once", id);
    else
        return false;
    return true;
}

/* operands: destination (-1), id, thread count (-1), predicate of a reduction (-1) */
static Outcome op_bar(Warp *w, const Ins *i, u32 lanes) {
    if (lanes != w->live) leave_others(w, lanes);
    Split *s = current_split(w);
    BarOp op = i->mod[BAR_OP];
    int l = first_lane(lanes);
    u32 id = R32(w, i->arg[1])[l], count = i->arg[2] >= 0 ? R32(w, i->arg[2])[l] : 0;
    if (id >= NAMED_BARRIERS || count % LANES || (i->arg[2] >= 0 && !count) || (i->arg[2] >= 0 && count > (u32)w->cta->nwarps * LANES)) {
        find(w, i, l, BAD_BARRIER, id, count, "barrier %u for %u threads: ids are 0 to 15, counts multiples of 32 up to the CTA's %d", id, count,
             w->cta->nwarps * LANES);
        stop(w->machine);
        return YIELD;
    }
    NamedBarrier *b = &w->cta->barrier[id];
    if (!b->done.clock[0]) b->gathering = new_knowledge(w->cluster), b->done = new_knowledge(w->cluster);
    if (!s->ticket) {
        if (misuse(w, i, l, id, count)) {
            stop(w->machine);
            return YIELD;
        }
        lanes_come(w, b, i, lanes, count);
        s->ticket = b->generation + 1;
    }
    arrive_if_whole(w, b, op, lanes);
    u32 required = count ? count : live_threads(w->cta);
    if (b->generation + 1 == s->ticket && b->arrived >= required) complete_bar(w->cta, b, op < BAR_POPC);
    if (op == BAR_ARRIVE) return b->waiting[w->index] & lanes ? BLOCK : NEXT;
    if (b->generation < s->ticket) return BLOCK;
    w->machine->launch->barrier_waits++;
    acquire_from(w, &b->done);
    if (w->time) {
        const ClockSetting *p = w->machine->time->p;
        wake_at(w, b->done_at + p->barrier_base + p->barrier_warp * required / LANES);
    }
    if (op == BAR_POPC) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = b->reduced_last; });
    if (op > BAR_POPC) set_pred(w, i->arg[0], lanes, b->reduced_last ? FULL : 0);
    return YIELD;
}

/* bar.warp.sync: its lanes have been gathered; memory between them is ordered. */
static Outcome op_warp_sync(Warp *w, const Ins *i, u32 lanes) {
    (void)i;
    lanes_meet(w, lanes);
    tick(w);
    return NEXT;
}

/* ---- barrier.cluster ---------------------------------------------------------------------------------------------------- */

static void complete_cluster_barrier(Cluster *c) {
    for (s32 t = 0; t < c->nctas; t++)
        for (s32 n = 0; n < c->cta[t].nwarps; n++) {
            const Warp *w = &c->cta[t].warp[n];
            if (w->live & ~w->cluster_here) return;
        }
    for (s32 t = 0; t < c->nctas; t++)
        for (s32 n = 0; n < c->cta[t].nwarps; n++) c->cta[t].warp[n].cluster_here = 0;
    learn(c, &c->done, &c->gathering);
    c->generation++;
    c->done_at = time_of(c->machine);
    machine_event(c->machine);
}

static Outcome op_cluster_arrive(Warp *w, const Ins *i, u32 lanes) {
    Cluster *c = w->cluster;
    if (!c->done.clock[0]) c->gathering = new_knowledge(c), c->done = new_knowledge(c);
    if (w->cluster_owed & lanes) {
        find(w, i, first_lane(lanes), BAD_BARRIER, 0, 0, "warp %d arrives twice at the cluster's barrier without a wait between", w->index);
        stop(w->machine);
        return YIELD;
    }
    w->cluster_here |= lanes;
    w->cluster_owed |= lanes;
    w->cluster_clock = warp_clock(w);
    if (!i->mod[CLUSTER_ARRIVE_RELAXED])
        release_to(w, &c->gathering);
    else if (w->has_released) /* a fence before it: what that fence released */
        learn(c, &c->gathering, &w->released);
    w->machine->progress++;
    complete_cluster_barrier(c);
    return NEXT;
}

static Outcome op_cluster_wait(Warp *w, const Ins *i, u32 lanes) {
    Cluster *c = w->cluster;
    if (lanes & ~w->cluster_owed) {
        find(w, i, first_lane(lanes), BAD_BARRIER, 0, 0, "warp %d waits at the cluster's barrier without having arrived", w->index);
        stop(w->machine);
        return YIELD;
    }
    if (w->cluster_here & lanes) complete_cluster_barrier(c); /* lanes may have exited since */
    if (w->cluster_here & lanes) return BLOCK;
    w->cluster_owed &= ~lanes;
    w->lanes_met = w->cluster_clock;
    w->machine->launch->barrier_waits++;
    acquire_from(w, &c->done);
    if (w->time) wake_at(w, c->done_at + (c->nctas > 1 ? w->machine->time->p->cluster_wake : w->machine->time->p->barrier_base));
    return YIELD;
}

/* ---- mbarrier ----------------------------------------------------------------------------------------------------------- */

enum { MOST_ARRIVALS = (1 << 20) - 1 };

static Mbarrier **mbarrier_slot(Warp *w, const Ins *i, int lane, u32 address, Cta **cta, u32 *offset) {
    u8 *p = shared_bytes(w, i, lane, address, 8, 8, cta, offset);
    return p ? &(*cta)->mbarrier[*offset / 8] : NULL;
}

void mbarrier_fenced(const Mbarrier *b, Warp *w, const Ins *i, int lane, const Knowledge *know) {
    bool remote = b->cta != w->cta;
    u32 fenced = b->fenced[remote];
    if (!w->machine->launch->checks || (fenced && know->clock[SEEN][b->by->actor] >= fenced)) return;
    Finding *f = find_at(w->machine, MBARRIER_UNFENCED, w, lane, i->index, b->ins, shared_address(b->cta, b->address), 8);
    if (f && f->count == 1)
        snprintf(f->text, sizeof f->text, "the mbarrier at shared address 0x%x is used by %s: fence.mbarrier_init is missing behind its initialisation",
                 b->address, remote ? "another CTA" : "the async proxy");
}

static void await_fence(Mbarrier *b, Warp *w) { /* notes that w has initialised it, and must run a fence */
    for (Mbarrier **link = b->by ? &b->by->unfenced : NULL; link && *link; link = &(*link)->next_unfenced)
        if (*link == b) {
            *link = b->next_unfenced;
            break;
        }
    b->by = w;
    b->fenced[0] = b->fenced[1] = 0;
    b->next_unfenced = w->unfenced;
    w->unfenced = b;
}

static void fence_initialisations(Warp *w, bool for_other_ctas) {
    for (Mbarrier *b = w->unfenced; b; b = b->next_unfenced) {
        if (!b->fenced[0]) b->fenced[0] = warp_clock(w);
        if (for_other_ctas) b->fenced[1] = warp_clock(w);
    }
    if (for_other_ctas) w->unfenced = NULL;
}

Mbarrier *mbarrier_at(Warp *w, const Ins *i, int lane, u32 address, bool must_live) {
    Cta *cta;
    u32 offset;
    Mbarrier **slot = mbarrier_slot(w, i, lane, address, &cta, &offset);
    if (!slot) return NULL;
    Mbarrier *b = *slot;
    if (must_live && (!b || !b->live)) {
        find(w, i, lane, BAD_MBARRIER, address, 8, "there is no mbarrier at shared address 0x%x%s", offset, b ? ": it has been invalidated" : "");
        return NULL;
    }
    if (b && cta->shared_history) { /* its initialisation must be ordered before this */
        Access a = warp_access(w, i, lane, SPACE_SHARED);
        a.scope = SCOPE_SYS;
        bytes_read(cta->shared_history, offset, 8, &a, shared_address(cta, offset));
    }
    if (b && cta != w->cta) mbarrier_fenced(b, w, i, lane, &w->know);
    return b;
}

static void broken_count(Mbarrier *b, const Warp *w, const Ins *i, int lane, const char *what, s64 value) {
    Finding *f = find_at(b->cta->machine, BAD_MBARRIER, w, lane, i->index, b->ins, shared_address(b->cta, b->address), 8);
    if (f && f->count == 1)
        snprintf(f->text, sizeof f->text, "%s of the mbarrier at shared address 0x%x is %lld in phase %llu (arrivals expected: %lld)", what, b->address,
                 (long long)value, (unsigned long long)b->phase, (long long)b->expected);
}

static void end_phase_if_due(Mbarrier *b) {
    if (b->pending || b->tx) return;
    trace_barrier(b->cta, TRACE_PHASE, b->ins, (s32)b->address, b->done_at, b->arrived_at);
    b->phase++;
    b->done_at = b->arrived_at;
    b->arrived_at = 0;
    b->pending = b->expected;
    Cluster *c = b->cta->cluster;
    knows_of(&b->arriving, (c->serial & 0xffff) << 16 | b->actor, (u32)b->phase);
    learn(c, &b->done, &b->arriving);
    machine_event(c->machine);
}

static void note_arrival(Mbarrier *b) {
    double arrived = clock_arrival(b->cta);
    if (arrived > b->arrived_at) b->arrived_at = arrived;
}

void mbarrier_arrive(Mbarrier *b, const Warp *w, const Ins *i, int lane, u32 count, const Knowledge *from) {
    note_arrival(b);
    if (from) learn(b->cta->cluster, &b->arriving, from);
    if (count > b->pending) {
        broken_count(b, w, i, lane, "more arrivals than are pending: the count", b->pending - (s64)count);
        b->pending = 0;
    } else
        b->pending -= count;
    b->cta->machine->progress++;
    end_phase_if_due(b);
}

void mbarrier_complete_tx(Mbarrier *b, const Warp *w, const Ins *i, int lane, s64 bytes) {
    note_arrival(b);
    b->tx -= bytes;
    if (b->tx < -MOST_ARRIVALS) broken_count(b, w, i, lane, "the count of bytes", b->tx);
    end_phase_if_due(b);
}

void mbarrier_too_few(const Mbarrier *b, Warp *w, const Ins *i, int lane) {
    find(w, i, lane, BAD_MBARRIER, shared_address(b->cta, b->address), 8,
         "lane %d arrives after other lanes of the same instruction have ended the phase: %lld arrivals are too few", lane, (long long)b->expected);
}

static void expect_tx(Mbarrier *b, const Warp *w, const Ins *i, int lane, u32 bytes) {
    b->tx += bytes;
    if (b->tx > MOST_ARRIVALS) broken_count(b, w, i, lane, "the count of bytes", b->tx);
    if (!b->tx && !b->pending) broken_count(b, w, i, lane, "expect_tx came after its phase's last arrival: the count of bytes", 0);
}

/* An order between CTAs that the manual gives to .cluster alone; hardware, and those who rely on it, keep it with .cta as well. */
static void relies_on_cta(Warp *w, const Ins *i, int lane, const Mbarrier *b, const char *what) {
    Machine *m = w->machine;
    if (!m->default_scope) m->default_scope = i;
    Finding *f = find_at(m, SCOPE_OF_CTA, w, lane, m->default_scope->index, -1, shared_address(b->cta, b->address), 8);
    if (f && f->count == 1) snprintf(f->text, sizeof f->text, "%s the mbarrier at shared address 0x%x with the default scope", what, b->address);
}

static u64 state_of(const Mbarrier *b) { return b->phase << 24 | (u64)b->pending; }

/* operands: address, count */
static Outcome op_mbarrier_init(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 address = (u32)address_operand(w, i, 0, MBARRIER_INIT_ADDRESS, l), count = R32(w, i->arg[1])[l], offset;
        Cta *cta;
        Mbarrier **slot = mbarrier_slot(w, i, l, address, &cta, &offset);
        if (!slot) continue;
        if (count < 1 || count > MOST_ARRIVALS) {
            find(w, i, l, BAD_MBARRIER, address, 8, "an mbarrier takes 1 to %d arrivals, not %u", MOST_ARRIVALS, count);
            continue;
        }
        if (*slot && (*slot)->live) find(w, i, l, BAD_MBARRIER, address, 8, "initialised again, while live, at shared address 0x%x", offset);
        u8 image[8];
        u64 raw = (u64)((1u << 21) - 2 * count) & 0x1ffffe, high = (u64)((1u << 20) - count) << 11;
        raw |= high << 32;
        memcpy(image, &raw, 8);
        if (cta->shared_history) {
            Access a = warp_access(w, i, l, SPACE_SHARED);
            bytes_written(cta->shared_history, offset, 8, &a, shared_address(cta, offset), cta->shared + offset, image);
        }
        memcpy(cta->shared + offset, image, 8);
        Mbarrier *b = *slot;
        if (!b) {
            Cluster *c = w->cluster;
            if (c->width == c->capacity) {
                find(w, i, l, UNSUPPORTED, address, 8, "more than %d mbarriers in a cluster", c->capacity - KINDS_OF_ACTOR * c->nwarps);
                stop(w->machine);
                return YIELD;
            }
            *slot = b = calloc(1, sizeof *b);
            b->address = offset;
            b->cta = cta;
            b->actor = c->width++;
            b->arriving = new_knowledge(c);
            b->done = new_knowledge(c);
        }
        b->phase = (b->phase + 1) & ~1ull; /* an even one, and none that its clock has stood for */
        b->live = true;
        b->expected = b->pending = count;
        b->tx = 0;
        b->from_other_cta = false;
        b->ins = i->index;
        b->done_at = time_of(w->machine);
        await_fence(b, w);
    }
    w->machine->progress++;
    return NEXT;
}

static Outcome op_mbarrier_inval(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 address = (u32)address_operand(w, i, 0, MBARRIER_INVAL_ADDRESS, l), offset;
        Mbarrier *b = mbarrier_at(w, i, l, address, true);
        Cta *cta;
        if (!b || !mbarrier_slot(w, i, l, address, &cta, &offset)) continue;
        b->live = false;
        if (cta->shared_history) {
            Access a = warp_access(w, i, l, SPACE_SHARED);
            bytes_written(cta->shared_history, offset, 8, &a, shared_address(cta, offset), NULL, NULL);
        }
    }
    return NEXT;
}

/* operands: state (-1), address, count (-1), bytes to expect (-1) */
static Outcome op_mbarrier_arrive(Warp *w, const Ins *i, u32 lanes) {
    bool released = false;
    speak_for_lanes(w);
    const Mbarrier *ended = NULL; /* the one whose phase an earlier lane of this instruction has ended */
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 address = (u32)address_operand(w, i, 1, MBARRIER_ARRIVE_ADDRESS, l), count = i->arg[2] >= 0 ? R32(w, i->arg[2])[l] : 1;
        Mbarrier *b = mbarrier_at(w, i, l, address, true);
        if (!b) continue;
        if (b == ended) mbarrier_too_few(b, w, i, l);
        note_visit(w, i, b->cta);
        if (b->cta != w->cta) {
            b->from_other_cta = true;
            if (!i->mod[MBARRIER_ARRIVE_RELAXED] && !i->mod[MBARRIER_ARRIVE_CLUSTER]) relies_on_cta(w, i, l, b, "arrives from another CTA at");
        }
        if (i->arg[3] >= 0) expect_tx(b, w, i, l, R32(w, i->arg[3])[l]);
        if (i->mod[MBARRIER_ARRIVE_DROP]) b->expected -= count;
        u64 before = state_of(b), phase = b->phase;
        mbarrier_arrive(b, w, i, l, count, i->mod[MBARRIER_ARRIVE_RELAXED] ? (w->has_released ? &w->released : NULL) : &w->know);
        released |= !i->mod[MBARRIER_ARRIVE_RELAXED];
        if (b->phase != phase) ended = b;
        if (i->arg[0] >= 0) R64(w, i->arg[0])[l] = before;
        if (i->mod[MBARRIER_ARRIVE_NO_COMPLETE] && b->phase != phase)
            find(w, i, l, BAD_MBARRIER, address, 8, "arrive.noComplete completed the phase");
    }
    if (released) tick(w);
    return NEXT;
}

/* operands: address, bytes */
static Outcome op_mbarrier_tx(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Mbarrier *b = mbarrier_at(w, i, l, (u32)address_operand(w, i, 0, MBARRIER_TX_ADDRESS, l), true);
        if (!b) continue;
        u32 bytes = R32(w, i->arg[1])[l];
        note_visit(w, i, b->cta);
        if (i->mod[MBARRIER_TX_COMPLETE])
            mbarrier_complete_tx(b, w, i, l, bytes);
        else
            expect_tx(b, w, i, l, bytes);
    }
    return NEXT;
}

/* operands: predicate, address, parity or state */
static u32 completed(Warp *w, const Ins *i, u32 lanes) {
    u32 bits = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Mbarrier *b = mbarrier_at(w, i, l, (u32)address_operand(w, i, 1, MBARRIER_WAIT_ADDRESS, l), true);
        if (!b) {
            stop(w->machine);
            continue;
        }
        bool done;
        if (i->mod[MBARRIER_WAIT_PARITY]) {
            u32 parity = R32(w, i->arg[2])[l];
            if (parity > 1) find(w, i, l, BAD_MBARRIER, b->address, 8, "a parity is 0 or 1, not %u", parity);
            done = (b->phase & 1) != (parity & 1);
        } else {
            u64 phase = R64(w, i->arg[2])[l] >> 24;
            if (phase != b->phase && phase + 1 != b->phase)
                find(w, i, l, BAD_MBARRIER, b->address, 8, "a wait for phase %llu in phase %llu: only the current and the one before may be asked for",
                     (unsigned long long)phase, (unsigned long long)b->phase);
            done = b->phase != phase;
        }
        if (!done) continue;
        bits |= 1u << l;
        if (w->time) wake_at(w, b->done_at + w->machine->time->p->mbarrier_wake);
        if (!i->mod[MBARRIER_WAIT_RELAXED]) acquire_from(w, &b->done);
        if (b->from_other_cta && !i->mod[MBARRIER_WAIT_RELAXED] && !i->mod[MBARRIER_WAIT_CLUSTER])
            relies_on_cta(w, i, l, b, "waits for another CTA's arrival at");
    }
    return bits;
}

static Outcome op_test_wait(Warp *w, const Ins *i, u32 lanes) {
    set_pred(w, i->arg[0], lanes, completed(w, i, lanes));
    return YIELD;
}

/* It may give up at any time, so it does the first time, against those who forget to ask again; in a loop it blocks, and with a clock
 * at once. */
Outcome op_try_wait(Warp *w, const Ins *i, u32 lanes) {
    Split *s = current_split(w);
    u32 bits = completed(w, i, lanes);
    bool again = s->tried == i->index + 1 || w->time;
    if (bits != lanes && again && !w->machine->launch->stopped) return BLOCK;
    s->tried = bits != lanes ? i->index + 1 : 0;
    set_pred(w, i->arg[0], lanes, bits);
    w->machine->launch->barrier_waits += again || bits == lanes;
    return bits != lanes ? YIELD : NEXT;
}

static Outcome op_pending_count(Warp *w, const Ins *i, u32 lanes) {
    EACH_LANE(lanes, { R32(w, i->arg[0])[l] = (u32)R64(w, i->arg[1])[l] & 0xffffff; });
    return NEXT;
}

void free_cta_barriers(Cta *cta) {
    for (u32 k = 0; k <= cta->machine->launch->shared_end / 8; k++) {
        Mbarrier *b = cta->mbarrier[k];
        if (!b) continue;
        free_knowledge(cta->cluster, &b->arriving);
        free_knowledge(cta->cluster, &b->done);
        free(b);
    }
    for (int k = 0; k < NAMED_BARRIERS; k++) {
        free_knowledge(cta->cluster, &cta->barrier[k].gathering);
        free_knowledge(cta->cluster, &cta->barrier[k].done);
    }
}

/* ---- fences ------------------------------------------------------------------------------------------------------------- */

/* isa/barriers.py has the bits: RELEASE 1, ACQUIRE 2; TO_ASYNC 1, TO_CTAS 2, which is both */
static Outcome op_fence(Warp *w, const Ins *i, u32 lanes) {
    (void)lanes;
    Knowledge *k = &w->know;
    if (i->mod[FENCE_ORDER] & 2) fence_acquire(w);
    for (int v = FENCED_SHARED; v <= FENCED_GLOBAL; v++)
        if (i->mod[FENCE_VIEWS] >> v & 1)
            for (s32 a = 0; a < w->cluster->width; a++)
                if (k->clock[v][a] < k->clock[SEEN][a]) k->clock[v][a] = k->clock[SEEN][a];
    if (i->mod[FENCE_ORDER] & 1) fence_release(w);
    if (i->mod[FENCE_MBARRIERS]) fence_initialisations(w, i->mod[FENCE_MBARRIERS] == 2);
    tick(w);
    return NEXT;
}

/* griddepcontrol.wait, for all that the grids ahead do; launch_dependents: the next grid may begin */
static Outcome op_grid(Warp *w, const Ins *i, u32 lanes) {
    (void)lanes;
    Launch *launch = w->machine->launch;
    if (i->mod[GRID_WAIT]) {
        w->know.grid_ahead = true;
        if (w->time) wake_at(w, w->machine->time->p->ahead);
    } else {
        launch->triggered |= w->know.grid_ahead ? TRIGGERED : TRIGGERED | TRIGGERED_EARLY;
        if (w->time && !w->cta->triggered) w->machine->time->p->triggered = time_of(w->machine);
        w->cta->triggered = true;
    }
    return NEXT;
}

/* ---- setmaxnreg --------------------------------------------------------------------------------------------------------- */

static Outcome op_setmaxnreg(Warp *w, const Ins *i, u32 lanes) {
    u32 threads = w->cta->nwarps * LANES, most = 65536 / threads / 8 * 8; /* where the count is unknown: what can have been given */
    bool known = w->max_registers > 0;
    if (!known) w->max_registers = most < 256 ? (s32)most : 248;
    s32 wanted = (s32)i->mod[SETMAXNREG_REGISTERS], change = wanted - w->max_registers;
    if (!known && i->mod[SETMAXNREG_INC] && change < 0) change = 0;
    if (wanted < 24 || wanted > 256 || wanted % 8 || (i->mod[SETMAXNREG_INC] ? change < 0 : change > 0)) {
        find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "setmaxnreg.%s to %d registers from %d: 24 to 256, a multiple of 8, and %s",
             i->mod[SETMAXNREG_INC] ? "inc" : "dec", wanted, w->max_registers, i->mod[SETMAXNREG_INC] ? "no fewer than now" : "no more than now");
        stop(w->machine);
        return YIELD;
    }
    if (change > w->cta->register_pool) return BLOCK;
    w->cta->register_pool -= change;
    w->max_registers = wanted;
    machine_event(w->machine);
    return NEXT;
}

const HandlerEntry barriers_handlers[] = {
    {"bar", op_bar}, {"warp_sync", op_warp_sync}, {"cluster_arrive", op_cluster_arrive}, {"cluster_wait", op_cluster_wait},
    {"mbarrier_init", op_mbarrier_init}, {"mbarrier_inval", op_mbarrier_inval}, {"mbarrier_arrive", op_mbarrier_arrive},
    {"mbarrier_tx", op_mbarrier_tx}, {"test_wait", op_test_wait}, {"try_wait", op_try_wait}, {"pending_count", op_pending_count},
    {"fence", op_fence}, {"grid", op_grid}, {"setmaxnreg", op_setmaxnreg}, {0},
};

/* ---- who waits for what ------------------------------------------------------------------------------------------------- */

bool barriers_explain_block(Warp *w, const Ins *i, int l, char *text, size_t size) {
    if (i->run == op_bar) {
        u32 id = R32(w, i->arg[1])[l];
        const NamedBarrier *b = &w->cta->barrier[id];
        u32 away = b->waiting[w->index] ? w->live & ~b->waiting[w->index] : 0;
        int n = snprintf(text, size, "waits at barrier %u: %u of %u threads have arrived", id, b->arrived,
                         b->expected ? b->expected : live_threads(w->cta));
        if (away) snprintf(text + n, size - n, "; lanes %08x of its warp have not", away);
    } else if (i->run == op_try_wait) {
        u32 address = (u32)address_operand(w, i, 1, MBARRIER_WAIT_ADDRESS, l), offset = address & 0xffffff;
        Cta *cta = cta_at(w->cluster, address);
        const Mbarrier *b = cta ? cta->mbarrier[offset / 8] : NULL;
        char ended[48] = "";
        if (b && b->phase) snprintf(ended, sizeof ended, " (phases that have ended: %llu)", (unsigned long long)b->phase);
        if (b)
            snprintf(text, size, "waits for the mbarrier at 0x%x: phase %llu%s, %lld of %lld arrivals %s %lld bytes %s", offset, (unsigned long long)b->phase,
                     ended, (long long)b->pending, (long long)b->expected, b->tx < 0 ? "are missing, and" : "and",
                     (long long)(b->tx < 0 ? -b->tx : b->tx), b->tx < 0 ? "more than expected have come" : "are missing");
    } else if (i->run == op_cluster_wait) {
        s32 missing = 0;
        for (s32 t = 0; t < w->cluster->nctas; t++)
            for (s32 n = 0; n < w->cluster->cta[t].nwarps; n++) {
                const Warp *other = &w->cluster->cta[t].warp[n];
                missing += (other->live & ~other->cluster_here) != 0;
            }
        snprintf(text, size, "waits at the cluster's barrier: %d warps have not arrived", missing);
    } else if (i->run == op_setmaxnreg)
        snprintf(text, size, "waits for %d registers a thread; %d are free", (s32)i->mod[SETMAXNREG_REGISTERS] - w->max_registers,
                 w->cta->register_pool);
    else
        return false;
    return true;
}
