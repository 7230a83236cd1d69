/* clusterlaunchcontrol: a running cluster takes over the work of one that has not started.
 *
 * The answer to try_cancel is ours to encode, as only query_cancel reads it: the first CTA's id in three words, then a mark that says
 * whether there is one. A CTA that has seen a request fail must not make another.
 */
#include "cancel.h"
#include "copies.h"
#include "findings.h"

enum { ANSWER_BYTES = 16 };
enum { CANCELED = 0x434c4301u, REFUSED = 0x434c4300u };

/* An answer that says no, as a CTA can learn of it: by the end of that phase of that mbarrier. */
typedef struct Refusal Refusal;
struct Refusal {
    u32 serial, clock;
    s32 rank, actor;
    Refusal *next;
};

static bool has_seen_refusal(const Warp *w) {
    for (const Refusal *r = w->machine->cancel; r; r = r->next)
        if (r->serial == w->cluster->serial && r->rank == w->cta->rank && w->know.clock[SEEN][r->actor] >= r->clock) return true;
    return false;
}

static void remember_refusal(Machine *m, const Mbarrier *b) {
    Refusal *r = malloc(sizeof *r);
    *r = (Refusal){b->cta->cluster->serial, mbarrier_next_clock(b), b->cta->rank, b->actor, m->cancel};
    m->cancel = r;
}

void cancel_at_end(Machine *m) {
    for (Refusal *r = m->cancel, *next; r; r = next) {
        next = r->next;
        free(r);
    }
    m->cancel = NULL;
}

static void run_cancel(Work *work) {
    const Landings *to = (const Landings *)work->data;
    Machine *m = work->warp->machine;
    const Launch *launch = m->launch;
    u32 answer[4] = {0, 0, 0, REFUSED};
    if (m->next_cluster < m->total_clusters) {
        u64 n = m->next_cluster++;
        for (int d = 0; d < 3; d++) {
            u64 clusters = launch->grid[d] / launch->cluster[d];
            answer[d] = (u32)(n % clusters) * launch->cluster[d];
            n /= clusters;
        }
        answer[3] = CANCELED;
    }
    for (s32 k = 0; k < to->count; k++) {
        if (answer[3] == REFUSED) remember_refusal(m, to->landing[k].barrier);
        land(work, &to->landing[k], (const u8 *)answer, ANSWER_BYTES);
    }
}

/* operands: address, mbarrier */
static Outcome op_try_cancel(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Target t = {.mask = i->mod[TRY_CANCEL_ALL_CTAS] ? (1 << w->cluster->nctas) - 1 : ALL, .align = ANSWER_BYTES};
        Landings to;
        if (!shared_operand(w, i, 0, TRY_CANCEL_TO, l, &t.address) || !shared_operand(w, i, 1, TRY_CANCEL_MBARRIER, l, &t.barrier)) continue;
        if (cta_at(w->cluster, t.address) != w->cta || cta_at(w->cluster, t.barrier) != w->cta) {
            find(w, i, l, BAD_OPERAND, t.address, ANSWER_BYTES, "the answer and its mbarrier must be in the CTA's own shared memory");
            continue;
        }
        if (has_seen_refusal(w)) find(w, i, l, BAD_OPERAND, 0, 0, "another request, though the CTA has seen one fail: no cluster was left");
        if (!find_landings(w, i, l, &t, ANSWER_BYTES, &to)) continue;
        Work *work = send_work(w, i, l, NULL, run_cancel, sizeof to);
        memcpy(work->data, &to, sizeof to);
    }
    return NEXT;
}

static const u32 *answer_of(Warp *w, const Ins *i, int operand, int l) {
    const u32 *answer = (const u32 *)&R64(w, i->arg[operand])[2 * l];
    if (answer[3] == CANCELED || answer[3] == REFUSED) return answer;
    find(w, i, l, BAD_OPERAND, 0, 0, "its operand is no answer of try_cancel");
    return NULL;
}

/* operands: predicate, answer */
static Outcome op_is_canceled(Warp *w, const Ins *i, u32 lanes) {
    u32 bits = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        const u32 *answer = answer_of(w, i, 1, l);
        if (answer && answer[3] == CANCELED) bits |= 1u << l;
    }
    set_pred(w, i->arg[0], lanes, bits);
    return NEXT;
}

/* operands: answer, then a register (or -1) for each of x, y, z */
static Outcome op_first_ctaid(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        const u32 *answer = answer_of(w, i, 0, l);
        if (!answer) continue;
        bool refused = answer[3] == REFUSED; /* undefined; compilers ask before they look whether it was canceled */
        u32 id[3] = {answer[0], answer[1], answer[2]};
        if (refused) memset(id, 0xff, sizeof id);
        for (int d = 0; d < 3; d++)
            if (i->arg[1 + d] >= 0) R32(w, i->arg[1 + d])[l] = id[d];
    }
    return NEXT;
}

const HandlerEntry cancel_handlers[] = {
    {"try_cancel", op_try_cancel}, {"is_canceled", op_is_canceled}, {"first_ctaid", op_first_ctaid}, {0},
};
