#include "work.h"
#include "clock.h"
#include "knowledge.h"

Queue *new_queue(Cluster *c, bool keep) {
    Queue *q = calloc(1, sizeof *q);
    q->cluster = c;
    q->keep = keep;
    q->next = &c->queues;
    q->previous = c->queues.previous;
    q->previous->next = q;
    c->queues.previous = q;
    return q;
}

static void free_queue(Queue *q) {
    q->previous->next = q->next;
    q->next->previous = q->previous;
    free(q);
}

void run_first(Queue *q) {
    Work *work = q->first;
    Cluster *c = q->cluster;
    bool in_turn = q->keep; /* a tensor core's: clocked.c says when it works */
    q->first = work->next;
    if (!q->first) q->last = NULL;
    if (!q->first && !q->keep) free_queue(q);
    c->pending_work--;
    c->machine->last_work = c->machine->ran;
    c->machine->launch->async_work++;
    c->machine->work_changes++;
    if (work->finish > c->ends_at) c->ends_at = work->finish;
    if (!in_turn) trace_warp(work->warp, TRACE_COPY, work->ins->index, 0, work->sent, work->finish);
    work->run(work);
    free_knowledge(c, &work->know);
    free(work);
    machine_event(c->machine);
}

Work *send_work(Warp *w, const Ins *i, int lane, Queue *queue, void (*run)(Work *), size_t n) {
    Work *work = calloc(1, sizeof *work + n);
    work->run = run;
    work->warp = w;
    work->ins = i;
    work->lane = lane;
    work->lanes = 1u << lane;
    work->know = new_knowledge(w->cluster);
    speak_for_lanes(w);
    copy_knowledge(w->cluster, &work->know, &w->know);
    tick(w);
    if (!queue) queue = new_queue(w->cluster, false);
    if (queue->last)
        queue->last->next = work;
    else
        queue->first = work;
    queue->last = work;
    w->cluster->pending_work++;
    w->machine->work_changes++;
    work->sent = time_of(w->machine);
    return work;
}

void run_groups(Warp *w, ActorKind kind, int lane, u32 clock, bool read) {
    Queue *ring = &w->cluster->queues;
    for (Queue *q = ring->next, *next; q != ring; q = next) {
        next = q->next;
        Work *work = q->first;
        if (!work || q->keep || work->warp != w || work->kind != kind || (lane != ALL && !lane_in(work->lanes, lane)) || work->clock > clock) continue;
        clock_await(w, work->read, work->finish, read);
        run_first(q);
    }
}

void run_queue(Queue *q) {
    while (q->first) run_first(q);
}
bool run_some_work(Machine *m) {
    u64 waiting = 0;
    for (Cluster *c = m->clusters; c; c = c->next)
        for (Queue *q = c->queues.next; q != &c->queues; q = q->next) waiting += q->first != NULL;
    if (!waiting) return false;
    u64 chosen = m->launch->seed ? machine_random(m) % waiting : 0;
    for (Cluster *c = m->clusters; c; c = c->next)
        for (Queue *q = c->queues.next; q != &c->queues; q = q->next)
            if (q->first && !chosen--) {
                run_first(q);
                return true;
            }
    return false;
}
