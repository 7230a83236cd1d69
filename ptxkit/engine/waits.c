/* Warps that wait: what for, and a wait that gives up. */
#include "waits.h"
#include "barriers.h"
#include "findings.h"
#include "tmem.h"
#include "warps.h"

#include <stdio.h>

bool give_up_a_wait(Machine *m) {
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w))
        for (s32 k = 0; k < w->nsplits; k++) {
            Split *s = &w->split[k];
            const Ins *i = &m->program->ins[s->pc];
            if (!s->blocked || i->run != op_try_wait || s->timeout == m->progress) continue;
            s->timeout = m->progress;
            set_pred(w, i->arg[0], passing(w, s, i), 0);
            finish(w, k, NEXT);
            return true;
        }
    return tmem_move_apart(m);
}

static void explain_block(Warp *w, const Split *s, char *text, size_t size) {
    const Ins *i = &w->machine->program->ins[s->pc];
    int l = first_lane(s->lanes);
    if (s->gathering)
        snprintf(text, size, "lanes %08x wait here for the others of %08x", s->lanes,
                 i->gather == 1 ? w->live : R32(w, i->arg[i->mod[MEMBERS_MASK]])[l] & w->live);
    else if (!barriers_explain_block(w, i, l, text, size) && !tmem_explain_block(w, i, text, size))
        snprintf(text, size, "waits");
}

void report_wait(Warp *w) {
    Machine *m = w->machine;
    for (s32 k = 0; k < w->nsplits; k++) {
        Split *s = &w->split[k];
        const Ins *i = &m->program->ins[s->pc];
        FindingKind kind = s->gathering && i->gather == 1 ? DIVERGED : DEADLOCK;
        Finding *f = find_at(m, kind, w, first_lane(s->lanes), s->pc, -1, 0, 0);
        if (!f || f->count != 1) continue;
        f->detail[0] = s->lanes;
        f->detail[1] = w->live;
        explain_block(w, s, f->text, sizeof f->text);
    }
}

void report_deadlock(Machine *m) {
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w)) report_wait(w);
    stop(m);
}
