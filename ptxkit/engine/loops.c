/* Warps that spin for ever.
 *
 * A warp that comes back to the same place with the same registers, while no memory and no mbarrier has changed, does the same again. When
 * all warps are like that or wait, and no asynchronous work is left, the launch never ends. Named barriers may come and go meanwhile: a warp
 * learns nothing from them, and who has come back has arrived at each that it ever will, so nobody else is let on. A loop that counts, or that
 * reads a clock, comes back with other registers: it may end.
 */
#include "loops.h"
#include "findings.h"
#include "waits.h"

#include <stdio.h>

typedef struct {
    u64 changes;    /* the machine's when this was seen */
    u64 ran, window; /* instructions that the machine had run then, and for how many more this is kept */
    u64 issued;     /* instructions that the warp had issued then */
    bool repeats;   /* the warp was the same again */
    s32 nsplits;
    Split split[MAX_SPLITS];
    u8 bytes[]; /* registers, local memory */
} Seen;

static u64 changes(const Machine *m) { return m->progress + m->work_changes - m->meetings; }
static u64 local_size(const Machine *m) { return m->program->local_bytes * LANES; }

static bool repeats(const Warp *w) {
    const Seen *s = w->seen;
    return s && s->repeats && s->changes == changes(w->machine);
}

static bool calls(const Warp *w) { /* the registers of a device function's callers are elsewhere */
    for (s32 j = 0; j < w->njoins; j++)
        if (w->join[j].open && w->join[j].call) return true;
    return false;
}

static bool waits(const Warp *w) { /* all its lanes, for somebody else */
    for (s32 k = 0; k < w->nsplits; k++)
        if (!w->split[k].blocked && !w->split[k].gathering) return false;
    return true;
}

static void see(Warp *w) {
    const Machine *m = w->machine;
    enum { WINDOW = 1 << 19 };
    Seen *s = w->seen;
    bool again = s && s->changes == changes(m);
    if (again && m->ran - s->ran < s->window) return;
    if (!s) s = w->seen = calloc(1, sizeof *s + m->program->register_bytes + local_size(m));
    s->window = again ? 2 * s->window : WINDOW; /* a loop of many turns needs a longer look */
    s->changes = changes(m);
    s->ran = m->ran;
    s->issued = w->issued;
    s->repeats = false;
    s->nsplits = w->nsplits;
    memcpy(s->split, w->split, w->nsplits * sizeof *w->split);
    memcpy(s->bytes, w->regs, m->program->register_bytes);
    if (w->local) memcpy(s->bytes + m->program->register_bytes, w->local, local_size(m));
}

static bool same(const Warp *w, const Seen *s) {
    const Machine *m = w->machine;
    if (s->nsplits != w->nsplits || s->issued == w->issued || calls(w)) return false;
    for (s32 k = 0; k < w->nsplits; k++)
        if (s->split[k].pc != w->split[k].pc || s->split[k].lanes != w->split[k].lanes) return false;
    return !memcmp(s->bytes, w->regs, m->program->register_bytes) &&
           (!w->local || !memcmp(s->bytes + m->program->register_bytes, w->local, local_size(m)));
}

void note_turn(Warp *w) {
    Seen *s = w->seen;
    if (s && !s->repeats && s->changes == changes(w->machine)) s->repeats = same(w, s);
}

void forget_turns(Warp *w) { free(w->seen); }

bool spins_for_ever(Machine *m) {
    bool all = true;
    for (const Cluster *c = m->clusters; c; c = c->next)
        if (c->pending_work) return false;
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w)) {
        if (!w->nsplits || repeats(w)) continue;
        see(w);
        all = all && waits(w);
    }
    return all;
}

void report_livelock(Machine *m) {
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w)) {
        if (!w->nsplits) continue;
        if (!repeats(w)) {
            report_wait(w);
            continue;
        }
        s32 k = 0;
        while (k + 1 < w->nsplits && (w->split[k].blocked || w->split[k].gathering)) k++;
        Finding *f = find_at(m, LIVELOCK, w, first_lane(w->split[k].lanes), w->split[k].pc, -1, 0, 0);
        if (f && f->count == 1) snprintf(f->text, sizeof f->text, "this loop never ends: nothing that it reads can change any more");
    }
    stop(m);
}
