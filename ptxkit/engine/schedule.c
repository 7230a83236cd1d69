/* The schedule: which warp runs, and when asynchronous work happens.
 *
 * When no warp of the resident clusters can run, one piece of asynchronous work does; when there is none left, another cluster starts;
 * then a try_wait may give up once; then it is a deadlock. So asynchronous work happens as late as the program allows.
 */
#include "schedule.h"
#include "clusters.h"
#include "copies.h"
#include "findings.h"
#include "loops.h"
#include "visits.h"
#include "waits.h"
#include "warps.h"
#include "work.h"

void report_limit(Machine *m) {
    for (Warp *w = warp_after(m, NULL); w; w = warp_after(m, w))
        if (w->nsplits) find_at(m, TOO_MANY_INSTRUCTIONS, w, 0, w->split[w->current].pc, -1, 0, m->launch->limit);
    stop(m);
}

static void reap(Machine *m) { /* clusters that have ended, or have asynchronous work alone left */
    for (Cluster **link = &m->clusters; *link;) {
        Cluster *c = *link;
        if (c->running) {
            link = &c->next;
            continue;
        }
        while (c->pending_work && !m->launch->stopped) run_some_work(m);
        *link = c->next;
        end_cluster(c);
        m->progress++;
    }
}

void add_cluster(Machine *m) {
    Cluster *c = start_cluster(m), **last = &m->clusters;
    while (*last) last = &(*last)->next;
    *last = c;
    m->progress++;
}

static void run_early_work(Machine *m) {
    for (Cluster *c = m->clusters; c; c = c->next)
        while (c->pending_work && run_some_work(m)) {}
}

void retire(Warp *w) {
    w->born = 0;
    if (!--w->cta->running) {
        w->cta->exited = true;
        visits_at_exit(w->cta);
        bulk_groups_at_exit(w->cta);
        w->cluster->running--;
    }
    machine_event(w->machine);
}

static bool run_round(Machine *m) { /* every warp gets a turn; did anything run? */
    Launch *launch = m->launch;
    bool ran = false;
    for (Cluster *c = m->clusters; c; c = c->next)
        for (s32 t = 0; t < c->nctas; t++) {
            Cta *cta = &c->cta[t];
            s32 first = launch->seed ? (s32)(machine_random(m) % cta->nwarps) : 0;
            for (s32 n = 0; n < cta->nwarps && !launch->stopped; n++) {
                Warp *w = &cta->warp[(first + n) % cta->nwarps];
                if (!w->nsplits) continue;
                if (launch->seed && machine_random(m) % 4 == 0) { /* passed over this time: the others get ahead */
                    ran = ran || pick_split(w);
                    continue;
                }
                u64 quantum = launch->seed ? 1 + machine_random(m) % launch->quantum : launch->quantum;
                u64 before = m->ran;
                if (run_warp(w, quantum)) {
                    ran = true;
                    note_turn(w);
                }
                launch->issued += m->ran - before;
                if (!w->nsplits && w->born) retire(w);
                if (launch->early) run_early_work(m);
            }
        }
    return ran;
}

void run_machine(Machine *m) {
    Launch *launch = m->launch;
    enum { PATIENCE = 1 << 18 }; /* instructions that spinning warps may run before asynchronous work goes on regardless */
    u64 looked = 0;
    while (!launch->stopped) {
        u64 resident = 0;
        for (Cluster *c = m->clusters; c; c = c->next) resident++;
        while (resident < launch->resident && m->next_cluster < m->total_clusters) add_cluster(m), resident++;
        if (!m->clusters || launch->stopped) return;
        if (run_round(m)) {
            reap(m);
            if (m->ran - m->last_work > PATIENCE && m->ran - looked > PATIENCE) {
                looked = m->ran;
                if (!run_some_work(m)) {
                    if (m->next_cluster < m->total_clusters)
                        add_cluster(m);
                    else if (spins_for_ever(m) && !give_up_a_wait(m))
                        report_livelock(m);
                }
            }
            if (launch->limit && launch->issued > launch->limit) report_limit(m);
            continue;
        }
        reap(m);
        if (!m->clusters || run_some_work(m)) continue;
        if (m->next_cluster < m->total_clusters) {
            add_cluster(m);
            continue;
        }
        if (!give_up_a_wait(m)) report_deadlock(m);
    }
}
