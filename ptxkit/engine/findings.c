#include "findings.h"

#include <stdarg.h>
#include <stdio.h>

enum { AT_ONE_SITE = 16, OF_A_KIND = 200 /* the others must have room, too: notes come by the hundred */ };

Finding *find_at(Machine *m, FindingKind kind, const Warp *w, int lane, s32 ins, s32 other_ins, u64 address, u64 size) {
    Launch *launch = m->launch;
    Finding *nearest = NULL; /* the newest of its kind at the instruction */
    s32 at_site = 0, of_kind = 0;
    static s32 last; /* the one that was asked for last time is mostly asked for again */
    for (s32 n = 0; n <= launch->nfindings; n++) {
        s32 k = n ? n - 1 : last;
        if (k >= launch->nfindings) continue;
        Finding *f = &launch->findings[k];
        bool same_place = f->ins == ins && f->other_ins == other_ins;
        bool same_warp = kind != DEADLOCK && kind != DIVERGED ? true : f->cta == (s32)w->cta->linear && f->warp == w->index;
        if (f->kind == (s32)kind && same_place && same_warp) {
            last = k;
            f->count++;
            launch->newest = k + 1;
            return f;
        }
        if (n && f->kind == (s32)kind) of_kind++;
        if (n && f->kind == (s32)kind && f->ins == ins) nearest = f, at_site++;
    }
    if (at_site == AT_ONE_SITE) { /* the rest counts there: other instructions get a word, too */
        nearest->count++;
        return nearest;
    }
    if (of_kind == OF_A_KIND || launch->nfindings == launch->max_findings) return NULL;
    Finding *f = &launch->findings[launch->nfindings++];
    *f = (Finding){.kind = kind, .ins = ins, .other_ins = other_ins, .cta = (s32)w->cta->linear, .warp = w->index, .lane = lane,
                   .other_actor = -1, .other_cluster = -1, .other_warp = -1, .address = address, .size = size, .count = 1};
    launch->newest = launch->nfindings;
    if (launch->fatal >> kind & 1) stop(m);
    return f;
}

Finding *find(const Warp *w, const Ins *i, int lane, FindingKind kind, u64 address, u64 size, const char *format, ...) {
    Finding *f = find_at(w->machine, kind, w, lane, i->index, -1, address, size);
    if (f && f->count == 1) {
        va_list values;
        va_start(values, format);
        vsnprintf(f->text, sizeof f->text, format, values);
        va_end(values);
    }
    return f;
}

void stop(Machine *m) {
    if (!m->launch->stopped) m->launch->stopped = m->launch->newest ? m->launch->newest : -1;
}
