/* Tensor memory from the side of the warps: tcgen05.alloc, dealloc, relinquish_alloc_permit, ld, st, wait.
 *
 * A ld reads and a st writes at once, but both stay open: their accesses are left under clocks of their own (BY_TMEM, BY_TMEM_STORE),
 * which the warp knows of after wait::ld and wait::st; a ld also once one of its registers is used. So whatever is not ordered after the
 * wait is a race, the warp's own next ld or st of the same cells among it.
 * CTAs that are resident on an SM share its columns, one of each cluster of a slot (Cluster.slot). An allocation waits for room, and for the
 * right to allocate, which a CTA has from its first allocation until it relinquishes it or ends.
 * Not documented, and decided here: n columns begin at a multiple of n, with a seed at any one that leaves the largest blocks whole, and
 * without one at the last; unpack::16b leaves poison in the upper halves.
 */
#include "tmem.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "numerics.h"
#include "products.h"
#include "registers.h"

#include <stdio.h>

/* ---- cells -------------------------------------------------------------------------------------------------------------- */

Tmem *tmem_of(Cta *cta) {
    Tmem *t = cta->tmem;
    if (t) return t;
    t = cta->tmem = calloc(1, sizeof *t);
    memset(t->word, 0xff, sizeof t->word);
    if (cta->machine->launch->checks) t->history = calloc(TMEM_LANES * TMEM_COLUMNS, sizeof(Cell));
    t->issuer = calloc((size_t)cta->nwarps * LANES, sizeof *t->issuer);
    return t;
}

static u32 units(u32 column, u32 columns) { /* a bit for each unit that these columns lie in */
    u32 first = column / TMEM_UNIT, last = (column + columns - 1) / TMEM_UNIT;
    return ((2u << last) - 1) & ~((1u << first) - 1);
}

u32 next_number(Warp *w) {
    u32 number = ++w->async_clock[BY_TENSOR];
    w->know.clock[BEFORE_TENSOR][actor_of(w, SENT_TO_TENSOR) & 0xffff] = number;
    return number;
}

/* Its own operations come after an allocation; another thread's only behind a fence, as they are asynchronous. */
static void after_allocation(Warp *w, const Ins *i, int lane, const Cta *cta, u32 column, const Knowledge *know) {
    const Tmem *t = cta->tmem;
    u32 unit = column / TMEM_UNIT;
    while (unit && !t->allocation[unit].columns) unit--;
    const Allocation *a = &t->allocation[unit];
    const Warp *by = &cta->warp[a->warp];
    if (!t->history || know->clock[BEFORE_TENSOR][actor_of(by, SENT_TO_TENSOR) & 0xffff] >= a->number) return;
    Finding *f = find_at(w->machine, TENSOR_UNFENCED, w, lane, i->index, a->ins, column, 0);
    if (!f || f->count != 1) return;
    f->space = SPACE_TMEM;
    f->other_actor = BY_WARP;
    f->other_cluster = (s32)w->cluster->serial - 1;
    f->other_warp = by->actor;
    strcpy(f->text, "tcgen05.fence::after_thread_sync");
}

bool tmem_held(Warp *w, const Ins *i, int lane, const Cta *cta, u32 column, u32 columns, const Knowledge *know, const char *what) {
    if (cta->exited && cta != w->cta) {
        find(w, i, lane, PEER_EXITED, column, columns, "%s is in tensor memory of CTA rank %d, which has exited", what, cta->rank);
        return false;
    }
    const Tmem *t = cta->tmem;
    if (lies_within(column, columns, 0, TMEM_COLUMNS) && t && !(units(column, columns) & ~t->held)) {
        after_allocation(w, i, lane, cta, column, know);
        return true;
    }
    Finding *f = find(w, i, lane, TMEM_MISUSE, column, columns,
                      "%s takes columns %u to %u of tensor memory, not all of them allocated (held are these units of 32, as bits: %04x)", what,
                      column, column + columns - 1, t ? t->held : 0);
    if (f) f->space = SPACE_TMEM;
    return false;
}

void tmem_read(Cta *cta, const Access *a, u32 lane, u32 column, u32 n, u32 *value) {
    Tmem *t = cta->tmem;
    if (t->history) history_read(t->history + lane * TMEM_COLUMNS + column, n, a, lane << 16 | column);
    memcpy(value, &t->word[lane][column], n * sizeof *value);
}

void tmem_write(Cta *cta, const Access *a, u32 lane, u32 column, u32 n, u32 *value) {
    Tmem *t = cta->tmem;
    if (t->history) history_write(t->history + lane * TMEM_COLUMNS + column, n, a, lane << 16 | column);
    memcpy(&t->word[lane][column], value, n * sizeof *value);
    cta->machine->progress++;
}

int tensor_ctas(Warp *w, const Ins *i, int lane, int group, Cta *ctas[2]) {
    ctas[0] = w->cta;
    if (group == 1) return 1;
    Cluster *c = w->cluster;
    s32 even = w->cta->rank & ~1;
    if (even + 1 >= c->nctas) {
        find(w, i, lane, TMEM_MISUSE, 0, 0, "cta_group::2 asks for a pair, but CTA rank %d of a cluster of %d has no peer", w->cta->rank, c->nctas);
        stop(w->machine);
        return 0;
    }
    ctas[0] = &c->cta[even];
    ctas[1] = &c->cta[even + 1];
    return 2;
}

static bool full_warp(Warp *w, const Ins *i, u32 lanes) {
    if (lanes == FULL) return true;
    find(w, i, first_lane(lanes), TMEM_MISUSE, 0, 0, "all 32 threads of the warp must run this; lanes %08x do", lanes);
    stop(w->machine);
    return false;
}

/* An operand that all lanes must agree on. */
static bool uniform(Warp *w, const Ins *i, s32 operand, const char *what, u32 *value) {
    const u32 *x = R32(w, i->arg[operand]);
    *value = x[0];
    for (int l = 1; l < LANES; l++)
        if (x[l] != x[0]) {
            find(w, i, l, TMEM_MISUSE, x[l], 0, "the lanes differ in %s: lane 0 has 0x%x, lane %d has 0x%x", what, x[0], l, x[l]);
            stop(w->machine);
            return false;
        }
    return true;
}

/* ---- alloc, dealloc, relinquish_alloc_permit ---------------------------------------------------------------------------- */

static bool share_an_sm(const Cluster *a, const Cluster *b) { return a == b || (a->slot == b->slot && !a->apart && !b->apart); }

/* The CTA after `other` (NULL: the first) of those that share the SM of this one, itself among them; NULL: there is none. */
static const Cta *neighbour_after(const Cta *cta, const Cta *other) {
    for (const Cluster *c = other ? other->cluster->next : cta->machine->clusters; c; c = c->next)
        if (share_an_sm(c, cta->cluster)) return &c->cta[cta->rank];
    return NULL;
}

static u32 taken_units(const Cta *cta) { /* of its SM */
    u32 taken = 0;
    for (const Cta *other = neighbour_after(cta, NULL); other; other = neighbour_after(cta, other))
        if (other->tmem) taken |= ((const Tmem *)other->tmem)->held;
    return taken;
}

static bool has_permit(const Cta *cta) {
    const Tmem *t = cta->tmem;
    return t && t->request[ALLOCATE].granted && !t->relinquished && !cta->exited;
}

static const Cta *other_with_permit(const Cta *cta) { /* on its SM; NULL: none has it */
    for (const Cta *other = neighbour_after(cta, NULL); other; other = neighbour_after(cta, other))
        if (other != cta && has_permit(other)) return other;
    return NULL;
}

/* The units of the largest free block around these n units, of those that begin at multiples of their size; 0: they are not free. */
static u32 free_block(u32 taken, u32 first, u32 n) {
    u32 size = 0;
    for (; n <= TMEM_UNITS && !(taken >> (first & -n) & ((1u << n) - 1)); n *= 2) size = n;
    return size;
}

/* Where columns are given that all of these CTAs have free; false: nowhere. The smallest free blocks are used up first. */
static bool find_room(Cta *const ctas[], int count, u32 columns, u32 *column) {
    const Machine *m = ctas[0]->machine;
    u32 n = columns / TMEM_UNIT, taken = 0, smallest = 2 * TMEM_UNITS, places = 0;
    for (int c = 0; c < count; c++) taken |= taken_units(ctas[c]);
    for (u32 first = 0; first < TMEM_UNITS; first += n) {
        u32 size = free_block(taken, first, n);
        if (size && size < smallest) smallest = size, places = 0;
        places += size && size == smallest;
    }
    u32 chosen = places && m->launch->seed ? (u32)(m->random >> 20) % places : places - 1; /* the schedule's next number is left alone */
    for (u32 first = 0; places && first < TMEM_UNITS; first += n)
        if (free_block(taken, first, n) == smallest && !chosen--) {
            *column = first * TMEM_UNIT;
            return true;
        }
    return false;
}

static void give(Cta *cta, u32 column, u32 columns) {
    Tmem *t = cta->tmem;
    Launch *launch = cta->machine->launch;
    const Request *r = &t->request[ALLOCATE];
    Warp *w = &cta->warp[r->warp];
    u32 number = next_number(w); /* synchronous: it comes before what the warp's next release orders */
    w->know.clock[BEFORE_SYNC][actor_of(w, SENT_TO_TENSOR) & 0xffff] = number;
    t->allocation[column / TMEM_UNIT] = (Allocation){columns, r->warp, r->ins, number};
    t->held |= units(column, columns);
    u64 all = (u64)__builtin_popcount(taken_units(cta)) * TMEM_UNIT;
    if (all > launch->tmem_columns) launch->tmem_columns = all;
}

static void take_back(Cta *cta, u32 column, u32 columns) { /* what they held is forgotten */
    Tmem *t = cta->tmem;
    t->allocation[column / TMEM_UNIT] = (Allocation){0};
    t->held &= ~units(column, columns);
    for (u32 lane = 0; lane < TMEM_LANES; lane++) {
        memset(&t->word[lane][column], 0xff, columns * sizeof(u32));
        if (t->history) memset(t->history + lane * TMEM_COLUMNS + column, 0, columns * sizeof(Cell));
    }
    forget_products(t, column, columns);
}

/* Does what the CTAs (one, or both of a pair) ask for; false: there is no room yet. */
static bool grant(Cta *const ctas[], int n, Wish wish) {
    const Request *first = &((const Tmem *)ctas[0]->tmem)->request[wish]; /* a pair's are allocated alike */
    u32 columns = first->columns, column = first->column;
    for (int c = 0; wish == ALLOCATE && c < n; c++)
        if (other_with_permit(ctas[c])) return false;
    if (wish == ALLOCATE && !find_room(ctas, n, columns, &column)) return false;
    for (int c = 0; c < n; c++) {
        Request *r = &((Tmem *)ctas[c]->tmem)->request[wish];
        if (wish == ALLOCATE)
            give(ctas[c], column, columns);
        else
            take_back(ctas[c], column, columns);
        r->open = false;
        r->result = column;
        r->granted++;
    }
    machine_event(ctas[0]->machine);
    return true;
}

static bool ask(Warp *w, const Ins *i, Wish wish, u32 column, u32 columns) { /* false: another warp of the CTA still waits for its own */
    Request *r = &tmem_of(w->cta)->request[wish];
    if (r->open) return false;
    *r = (Request){.open = true, .column = column, .columns = columns, .warp = w->index, .ins = i->index, .granted = r->granted};
    current_split(w)->ticket = r->granted + 1;
    w->machine->progress++;
    return true;
}

/* Waits until what this warp has asked for is granted (Split.ticket: its number among the CTA's wishes). */
static Outcome await(Warp *w, const Ins *i, Cta *const ctas[], int n, Wish wish) {
    const Request *mine = &tmem_of(w->cta)->request[wish], *other = &tmem_of(ctas[n == 2 && w->cta == ctas[0]])->request[wish];
    if (mine->granted >= current_split(w)->ticket) return NEXT;
    if (!other->open) return BLOCK;
    if (other->columns != mine->columns || other->column != mine->column) {
        find(w, i, 0, TMEM_MISUSE, mine->column, mine->columns,
             "the CTAs of a pair must ask for the same: here %u columns (at %u), in the peer %u (at %u)", mine->columns, mine->column,
             other->columns, other->column);
        stop(w->machine);
        return YIELD;
    }
    return grant(ctas, n, wish) ? NEXT : BLOCK;
}

static bool good_size(Warp *w, const Ins *i, u32 columns) {
    if (columns >= TMEM_UNIT && columns <= TMEM_COLUMNS && !(columns & (columns - 1))) return true;
    find(w, i, 0, TMEM_MISUSE, 0, columns, "asks for %u columns: it must be a power of two from 32 to 512", columns);
    stop(w->machine);
    return false;
}

static void check_permit(Warp *w, const Ins *i, u32 columns) {
    Tmem *t = w->cta->tmem;
    if (t->relinquished) find(w, i, 0, TMEM_MISUSE, 0, columns, "allocates %u columns after relinquish_alloc_permit", columns);
    if (t->last_columns && columns > t->last_columns)
        find(w, i, 0, TMEM_MISUSE, 0, columns, "allocates %u columns after %u: a CTA's allocations must not grow", columns, t->last_columns);
    t->last_columns = columns;
}

/* operands: address of the result, columns */
static Outcome op_alloc(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    u32 columns;
    if (!full_warp(w, i, lanes) || !uniform(w, i, 1, "the number of columns", &columns) || !good_size(w, i, columns)) return YIELD;
    int n = tensor_ctas(w, i, 0, (int)i->mod[TMEM_ALLOC_GROUP], ctas);
    if (!n) return YIELD;
    Tmem *t = tmem_of(w->cta);
    if (!current_split(w)->ticket) {
        if (!ask(w, i, ALLOCATE, 0, columns)) return BLOCK;
        check_permit(w, i, columns);
    }
    if (await(w, i, ctas, n, ALLOCATE) == BLOCK) return BLOCK;
    u64 to = address_operand(w, i, 0, TMEM_ALLOC_TO, 0);
    Access a = warp_access(w, i, 0, SPACE_SHARED);
    a.in_either = true; /* the manual: it maintains same-address ordering with respect to non-tcgen05 instructions, and copies are such */
    if (i->mod[TMEM_ALLOC_TO + PLACE_GENERIC] && to >> 56 != WINDOW_SHARED)
        find(w, i, 0, OUT_OF_BOUNDS, to, 4, "tcgen05.alloc writes its result to shared memory; generic address 0x%llx is elsewhere",
             (unsigned long long)to);
    else
        shared_write(w, i, &a, (u32)to, &t->request[ALLOCATE].result, 4, 4);
    return YIELD;
}

/* Freeing is like writing: all other accesses to these columns must be ordered before it. */
static void write_all(Warp *w, const Ins *i, u32 column, u32 columns) {
    Tmem *t = w->cta->tmem;
    Access a = warp_access(w, i, 0, SPACE_TMEM);
    for (u32 lane = 0; t->history && lane < TMEM_LANES; lane++)
        history_write(t->history + lane * TMEM_COLUMNS + column, columns, &a, lane << 16 | column);
}

/* operands: taddr, columns */
static Outcome op_dealloc(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    u32 taddr, columns;
    int group = (int)i->mod[TMEM_DEALLOC_GROUP];
    if (!full_warp(w, i, lanes) || !uniform(w, i, 0, "the address", &taddr) || !uniform(w, i, 1, "the number of columns", &columns)) return YIELD;
    int n = tensor_ctas(w, i, 0, group, ctas);
    if (!n) return YIELD;
    Tmem *t = tmem_of(w->cta);
    if (!current_split(w)->ticket) {
        u32 allocated = taddr < TMEM_COLUMNS && taddr % TMEM_UNIT == 0 ? t->allocation[taddr / TMEM_UNIT].columns : 0;
        if (allocated != columns) {
            find(w, i, 0, TMEM_MISUSE, taddr, columns, "deallocates %u columns at 0x%x; an allocation of %u columns starts there", columns,
                 taddr, allocated);
            return NEXT;
        }
        if (!ask(w, i, DEALLOCATE, taddr, columns)) return BLOCK;
        run_queue(queue_of(w->cta, group)); /* no later than now, so that what still runs is found to race */
        write_all(w, i, taddr, columns);
    }
    return await(w, i, ctas, n, DEALLOCATE);
}

static Outcome op_relinquish(Warp *w, const Ins *i, u32 lanes) {
    if (full_warp(w, i, lanes)) tmem_of(w->cta)->relinquished = true;
    machine_event(w->machine);
    return NEXT;
}

static const Cta *other_with_columns(const Cta *cta) {
    for (const Cta *other = neighbour_after(cta, NULL); other; other = neighbour_after(cta, other))
        if (other != cta && other->tmem && ((const Tmem *)other->tmem)->held) return other;
    return NULL;
}

bool tmem_explain_block(Warp *w, const Ins *i, char *text, size_t size) {
    if (i->run != op_alloc && i->run != op_dealloc) return false;
    Cta *cta = w->cta;
    const Tmem *t = cta->tmem;
    const Request *r = &t->request[i->run == op_alloc ? ALLOCATE : DEALLOCATE];
    const Cta *other = other_with_permit(cta);
    u32 column;
    if (r->warp != w->index)
        snprintf(text, size, "waits for warp %d of the CTA, which itself waits to be given tensor memory, or to give it back", r->warp);
    else if (i->run == op_alloc && other)
        snprintf(text, size, "waits for the right to allocate tensor memory, which CTA %llu on the same SM has not relinquished",
                 (unsigned long long)other->linear);
    else if (i->run == op_alloc && !find_room(&cta, 1, r->columns, &column)) {
        int n = snprintf(text, size, "waits for %u columns of tensor memory; %d of %d are allocated", r->columns,
                         __builtin_popcount(taken_units(cta)) * TMEM_UNIT, TMEM_COLUMNS);
        if ((other = other_with_columns(cta)))
            snprintf(text + n, size - n, ", %d of them by CTA %llu on the same SM", __builtin_popcount(((const Tmem *)other->tmem)->held) * TMEM_UNIT,
                     (unsigned long long)other->linear);
    } else
        snprintf(text, size, "waits for a warp of the other CTA of the pair to ask for the same");
    return true;
}

static bool waits_for_columns(const Cta *cta) { return cta->tmem && ((const Tmem *)cta->tmem)->request[ALLOCATE].open; }

static bool cluster_waits(const Cluster *c) {
    for (s32 t = 0; t < c->nctas; t++)
        if (waits_for_columns(&c->cta[t])) return true;
    return false;
}

/* Does a CTA wait for columns, or the right, of one whose cluster waits for something else? */
static bool could_go_on_elsewhere(const Cta *cta) {
    for (const Cta *other = neighbour_after(cta, NULL); waits_for_columns(cta) && other; other = neighbour_after(cta, other))
        if (other != cta && other->tmem && (((const Tmem *)other->tmem)->held || has_permit(other)) && !cluster_waits(other->cluster)) return true;
    return false;
}

bool tmem_move_apart(Machine *m) {
    const Launch *launch = m->launch;
    u64 ctas = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    for (Cluster *c = ctas <= launch->sms ? m->clusters : NULL; c; c = c->next)
        for (s32 t = 0; !c->apart && t < c->nctas; t++)
            if (could_go_on_elsewhere(&c->cta[t])) {
                c->apart = true;
                machine_event(m);
                return true;
            }
    return false;
}

void tmem_at_exit(Cta *cta) {
    Tmem *t = cta->tmem;
    if (!t) return;
    Machine *m = cta->machine;
    for (int k = 0; k < TMEM_UNITS && !m->launch->stopped; k++) {
        const Allocation *a = &t->allocation[k];
        if (a->columns)
            find(&cta->warp[a->warp], &m->program->ins[a->ins], 0, TMEM_LEAK, k * TMEM_UNIT, a->columns, "%u columns at %d were never deallocated",
                 a->columns, k * TMEM_UNIT);
    }
    for (s32 n = 0; n < cta->nwarps * LANES; n++) {
        if (!t->issuer[n]) continue;
        free_knowledge(cta->cluster, &t->issuer[n]->done);
        free(t->issuer[n]->sent);
        free(t->issuer[n]);
    }
    free(t->issuer);
    free(t->products);
    free(t->history);
    free(t);
    cta->tmem = NULL;
}

/* ---- ld and st ---------------------------------------------------------------------------------------------------------- */

typedef enum { M32X32, M16X64, M16X128, M16X256, M16X32X2 } MoveShape;
/* operands: taddr, result of the reduction (-1), the registers */
enum { MOST_REGISTERS = 128 };
/* lanes: of the shape; columns: that one repeat covers; registers: that one repeat takes */
static const struct { u8 lanes, columns, registers; } move_shapes[] = {
    [M32X32] = {32, 1, 1}, [M16X64] = {16, 2, 1}, [M16X128] = {16, 4, 2}, [M16X256] = {16, 8, 4}, [M16X32X2] = {16, 1, 1},
};

typedef struct { u32 lane, column; } Spot;

/* Where register r of thread t lies, relative to the address of its half. */
static Spot spot(MoveShape shape, u32 t, u32 r) {
    switch (shape) {
    case M16X64: return (Spot){t / 4 + 8 * (t % 2), t / 2 % 2 + 2 * r};
    case M16X128: return (Spot){t / 4 + 8 * (r % 2), t % 4 + 4 * (r / 2)};
    case M16X256: return (Spot){t / 4 + 8 * (r / 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r / 4)};
    case M16X32X2: return (Spot){t % 16, r};
    default: return (Spot){t, r};
    }
}

typedef struct {
    MoveShape shape;
    u32 registers, cells; /* cells: of a register; packed halves lie in two */
    u32 lane, column[2];  /* column[1]: of threads 16 to 31 of 16x32bx2 */
} Move;

static bool check_move(Warp *w, const Ins *i, u32 lanes, Move *m) {
    u32 taddr;
    if (!full_warp(w, i, lanes) || !uniform(w, i, 0, "the address", &taddr)) return false;
    taddr += (u32)i->mod[TMEM_MOVE_OFFSET];
    u32 second = taddr + (u32)i->mod[TMEM_MOVE_HALF], slab = w->index % SLABS * SLAB;
    m->shape = (MoveShape)i->mod[TMEM_MOVE_SHAPE];
    m->registers = (u32)i->mod[TMEM_MOVE_REGISTERS];
    m->cells = i->mod[TMEM_MOVE_PACKED] ? 2 : 1;
    m->lane = taddr >> 16;
    m->column[0] = taddr & 0xffff;
    m->column[1] = second & 0xffff;
    bool half = move_shapes[m->shape].lanes < SLAB;
    u32 named = m->lane & -SLAB, within = m->lane % SLAB; /* slab 0 stands for the warp's own: code that runs on silicon leaves it out */
    if ((named && named != slab) || (within && !(half && within == 16))) {
        find(w, i, 0, TMEM_MISUSE, taddr, 0, "lane %u: warp %d of the CTA may touch lanes %u to %u, from lane %u%s", m->lane, w->index, slab,
             slab + SLAB - 1, slab, half ? " or 16 more" : "");
        within = half ? within & 16 : 0; /* go on where it may have been meant to */
    }
    m->lane = slab + within;
    if (second >> 16 != taddr >> 16) {
        find(w, i, 0, UNSUPPORTED, second, 0, "the offset of the second half makes the address 0x%x, in another lane: its effect is not documented",
             second);
        return false;
    }
    u32 columns = m->registers / move_shapes[m->shape].registers * move_shapes[m->shape].columns * m->cells;
    return tmem_held(w, i, 0, w->cta, m->column[0], columns, &w->know, "this") &&
           tmem_held(w, i, 0, w->cta, m->column[1], columns, &w->know, "its second half");
}

/* A thread's cells, in the order of its registers; neighbours in a lane go together. */
static void move_thread(Cta *cta, const Move *m, const Access *a, u32 thread, u32 *value, Transfer transfer) {
    u32 n = m->registers * m->cells, base = m->column[m->shape == M16X32X2 && thread >= 16];
    Spot run = {0, 0};
    for (u32 k = 0, length = 0; k <= n; k++) {
        Spot s = spot(m->shape, thread, k / m->cells);
        s.column = s.column * m->cells + k % m->cells;
        if (length && (k == n || s.lane != run.lane || s.column != run.column + length)) {
            transfer(cta, a, m->lane + run.lane, base + run.column, length, value + k - length);
            length = 0;
        }
        if (!length) run = s;
        length++;
    }
}

static Access move_access(Warp *w, const Ins *i, int lane, ActorKind kind) {
    Access a = warp_access(w, i, lane, SPACE_TMEM);
    a.actor = actor_of(w, kind);
    a.clock = w->async_clock[kind];
    a.async = true;
    return a;
}

typedef enum { REDUCE_NONE, REDUCE_MIN, REDUCE_MAX } Reduce;
typedef enum { REDUCE_F32, REDUCE_U32, REDUCE_S32 } ReduceType;

static u32 extremum(const Ins *i, u32 a, u32 b) {
    bool max = i->mod[TMEM_MOVE_REDUCE] == REDUCE_MAX;
    if (i->mod[TMEM_MOVE_TYPE] == REDUCE_U32) return (a < b) == max ? b : a;
    if (i->mod[TMEM_MOVE_TYPE] == REDUCE_S32) return ((s32)a < (s32)b) == max ? b : a;
    float x = bits_float(a), y = bits_float(b);
    if (x != x || y != y) return !i->mod[TMEM_MOVE_NAN] && x == x ? a : !i->mod[TMEM_MOVE_NAN] && y == y ? b : 0x7fffffff;
    if (x == y) return max ? a & b : a | b; /* -0 is less than +0 */
    return (x < y) == max ? b : a;
}

static Outcome op_tmem_ld(Warp *w, const Ins *i, u32 lanes) {
    Move m;
    if (!check_move(w, i, lanes, &m)) return NEXT;
    u32 clock = ++w->async_clock[BY_TMEM];
    for (int t = 0; t < LANES; t++) {
        u32 value[2 * MOST_REGISTERS], result = 0;
        Access a = move_access(w, i, t, BY_TMEM);
        move_thread(w->cta, &m, &a, t, value, tmem_read);
        for (u32 r = 0; r < m.registers; r++) {
            u32 x = m.cells == 1 ? value[r] : (value[2 * r] & 0xffff) | value[2 * r + 1] << 16;
            if (i->arg[2 + r] >= 0) R32(w, i->arg[2 + r])[t] = x;
            if (i->mod[TMEM_MOVE_ABS]) x &= 0x7fffffff;
            result = r ? extremum(i, result, x) : x;
        }
        if (i->arg[1] >= 0) R32(w, i->arg[1])[t] = result;
    }
    clock_tmem(w, m.registers * m.cells, false);
    in_flight_add(w, i->arg + 1, 1 + (s32)m.registers, BY_TMEM, WRITTEN, i->index, clock);
    return NEXT;
}

static Outcome op_tmem_st(Warp *w, const Ins *i, u32 lanes) {
    Move m;
    if (!check_move(w, i, lanes, &m)) return NEXT;
    w->async_clock[BY_TMEM_STORE]++;
    clock_tmem(w, m.registers * m.cells, true);
    for (int t = 0; t < LANES; t++) {
        u32 value[2 * MOST_REGISTERS];
        Access a = move_access(w, i, t, BY_TMEM_STORE);
        for (u32 r = 0; r < m.registers; r++) {
            u32 x = R32(w, i->arg[2 + r])[t];
            if (m.cells == 1) {
                value[r] = x;
            } else {
                value[2 * r] = (x & 0xffff) | POISON_HALF;
                value[2 * r + 1] = x >> 16 | POISON_HALF;
            }
        }
        move_thread(w->cta, &m, &a, t, value, tmem_write);
    }
    return NEXT;
}

static Outcome op_tmem_wait(Warp *w, const Ins *i, u32 lanes) {
    ActorKind kind = i->mod[TMEM_WAIT_STORES] ? BY_TMEM_STORE : BY_TMEM;
    if (!full_warp(w, i, lanes)) return YIELD;
    knows_of(&w->know, actor_of(w, kind), w->async_clock[kind]);
    if (w->time) wake_at(w, kind == BY_TMEM ? w->time->loads_end : w->time->stores_end);
    if (kind == BY_TMEM) in_flight_remove(w, kind, w->async_clock[kind]);
    return NEXT;
}

static Outcome op_tmem_fence(Warp *w, const Ins *i, u32 lanes) {
    (void)lanes;
    fence_view(w->cluster, &w->know, i->mod[TMEM_FENCE_AFTER] ? BEFORE_TENSOR : BEFORE_SYNC, i->mod[TMEM_FENCE_AFTER] ? BEFORE_SYNC : BEFORE_TENSOR);
    return NEXT;
}

const HandlerEntry tmem_handlers[] = {
    {"tmem_alloc", op_alloc}, {"tmem_dealloc", op_dealloc}, {"tmem_relinquish", op_relinquish},
    {"tmem_ld", op_tmem_ld},  {"tmem_st", op_tmem_st},      {"tmem_wait", op_tmem_wait},        {"tmem_fence", op_tmem_fence}, {0},
};
