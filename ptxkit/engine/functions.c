/* Calls of the program's own device functions.
 *
 * A function has registers and parameters of its own, one set for the whole program: the lanes that call it together run in it as one
 * split, whose join they reach when they return. Arguments and results are copied between the .param variables of both sides, which lie
 * in local memory. A function that may be called while it runs (`recursive`) is saved at each call, lane by lane, and restored at the
 * return; its .local variables lie on a stack.
 */
#include "control.h"
#include "findings.h"

/* arg: the callee's address (-1: there is one target); where a lane's stack ends (-1: no stack).
 * mod: the fields of CALL, (bytes, place) of each argument and result, then the targets. A target: the fields of TARGET, the place of each
 * parameter and result, (offset, width) of its registers, and (register, place) of what holds the address of something on its stack. */
enum { MOST_DEPTH = 4096 };

static const s64 *arguments_of(const Ins *i) { return i->mod + CALL_FIELDS; }
static const s64 *results_of(const Ins *i) { return i->mod + CALL_FIELDS + 2 * i->mod[CALL_ARGUMENTS]; }
static const s64 *first_target(const Ins *i) { return results_of(i) + 2 * i->mod[CALL_RESULTS]; }
static const s64 *places_of(const s64 *target) { return target + TARGET_FIELDS; }
static const s64 *registers_of(const Ins *i, const s64 *target) { return places_of(target) + i->mod[CALL_ARGUMENTS] + i->mod[CALL_RESULTS]; }
static const s64 *pointers_of(const Ins *i, const s64 *target) { return registers_of(i, target) + 2 * target[TARGET_REGISTERS]; }

static const s64 *target_at(const Ins *i, u64 address) {
    const s64 *target = first_target(i);
    for (s64 n = 0; n < i->mod[CALL_TARGETS]; n++, target += target[TARGET_LENGTH])
        if ((u64)target[TARGET_ADDRESS] == address) return target;
    return NULL;
}

static u8 *local_of(const Warp *w, int lane) { return w->local + (u64)lane * w->machine->program->local_bytes; }
static u64 register_bytes(s64 width) { return width ? (u64)width * LANES : sizeof(u32); }

/* ---- saving ------------------------------------------------------------------------------------------------------------- */

static void save(const Warp *w, Call *c) {
    const s64 *r = registers_of(c->i, c->target);
    u64 room = 0, n = (u64)(c->target[TARGET_LOCAL_TO] - c->target[TARGET_LOCAL_FROM]);
    for (s64 k = 0; k < c->target[TARGET_REGISTERS]; k++) room += register_bytes(r[2 * k + 1]);
    u8 *to = c->registers = malloc(room + 1);
    for (s64 k = 0; k < c->target[TARGET_REGISTERS]; k++, to += register_bytes(r[2 * k - 1])) memcpy(to, w->regs + r[2 * k], register_bytes(r[2 * k + 1]));
    c->local = malloc(n * LANES + 1);
    for (int l = 0; l < LANES; l++) memcpy(c->local + (u64)l * n, local_of(w, l) + c->target[TARGET_LOCAL_FROM], n);
}

static void restore(Warp *w, const Call *c, u32 lanes) {
    const s64 *r = registers_of(c->i, c->target);
    const u8 *from = c->registers;
    u64 n = (u64)(c->target[TARGET_LOCAL_TO] - c->target[TARGET_LOCAL_FROM]);
    for (s64 k = 0; k < c->target[TARGET_REGISTERS]; k++, from += register_bytes(r[2 * k - 1])) {
        u64 width = (u64)r[2 * k + 1];
        u8 *to = w->regs + r[2 * k];
        if (!width) {
            u32 bits;
            memcpy(&bits, from, sizeof bits);
            set_pred(w, (s32)r[2 * k], lanes, bits);
        }
        EACH_LANE(lanes, { memcpy(to + (u64)l * width, from + (u64)l * width, width); });
    }
    EACH_LANE(lanes, { memcpy(local_of(w, l) + c->target[TARGET_LOCAL_FROM], c->local + (u64)l * n, n); });
}

/* ---- the stack ---------------------------------------------------------------------------------------------------------- */

static bool push(Warp *w, const Ins *i, const s64 *target, u32 lanes) {
    if (i->arg[1] < 0) return true;
    u32 *end = R32(w, i->arg[1]);
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        if (end[l] + target[TARGET_FRAME] > i->mod[CALL_STACK_END]) {
            find(w, i, l, OUT_OF_BOUNDS, end[l], (u64)target[TARGET_FRAME], "the stack of a thread is full: a recursion too deep");
            stop(w->machine);
            return false;
        }
        const s64 *p = pointers_of(i, target);
        for (s64 k = 0; k < target[TARGET_POINTERS]; k++) R64(w, (s32)p[2 * k])[l] = end[l] + (u64)p[2 * k + 1];
        end[l] += (u32)target[TARGET_FRAME];
    }
    return true;
}

static void pop(Warp *w, const Call *c, u32 lanes) {
    if (c->i->arg[1] < 0) return;
    u32 *end = R32(w, c->i->arg[1]);
    EACH_LANE(lanes, { end[l] -= (u32)c->target[TARGET_FRAME]; });
}

/* ---- call and return ---------------------------------------------------------------------------------------------------- */

static void pass_arguments(Warp *w, const Ins *i, const s64 *target, const s64 *from, s64 count, bool back, u32 lanes) {
    const s64 *places = places_of(target) + (back ? i->mod[CALL_ARGUMENTS] : 0);
    for (s64 k = 0; k < count; k++)
        EACH_LANE(lanes, {
            u8 *local = local_of(w, l);
            memmove(local + (back ? from[2 * k + 1] : places[k]), local + (back ? places[k] : from[2 * k + 1]), (size_t)from[2 * k]);
        });
}

static s32 depth_of(const Warp *w, s32 join) {
    s32 depth = 0;
    for (; join >= 0; join = w->join[join].outer) depth++;
    return depth;
}

static Outcome op_call(Warp *w, const Ins *i, u32 lanes) {
    const u64 *address = i->arg[0] < 0 ? NULL : R64(w, i->arg[0]);
    u64 first = address ? address[first_lane(lanes)] : (u64)first_target(i)[TARGET_ADDRESS];
    const s64 *target = target_at(i, first);
    u32 taking = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1)
        if (!address || address[first_lane(rest)] == first) taking |= 1u << first_lane(rest);
    if (!target) {
        find(w, i, first_lane(lanes), BAD_OPERAND, first, 0, "0x%llx is not the address of a function with these arguments", (unsigned long long)first);
        stop(w->machine);
        return YIELD;
    }
    Split *s = current_split(w);
    if (target[TARGET_RECURSIVE] && depth_of(w, s->join) > MOST_DEPTH) {
        find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "a recursion deeper than %d calls", MOST_DEPTH);
        stop(w->machine);
        return YIELD;
    }
    s32 outer = s->join;
    u32 off = s->lanes & ~lanes, again = lanes & ~taking; /* these fall through; those call another function, and come here again */
    if ((off | again) && (outer < 0 || w->join[outer].pc != i->index + 1)) outer = new_join(w, i->index + 1, s->lanes, s->join);
    if (again) add_split(w, i->index, again, outer);
    if (off) add_split(w, i->index + 1, off, outer);
    s->lanes = taking;
    s->join = new_join(w, -1, taking, outer);
    Call *c = calloc(1, sizeof *c);
    *c = (Call){.i = i, .target = target};
    w->join[s->join].lands = i->index + 1;
    w->join[s->join].call = c;
    if (target[TARGET_RECURSIVE]) save(w, c);
    pass_arguments(w, i, target, arguments_of(i), i->mod[CALL_ARGUMENTS], false, taking);
    if (!push(w, i, target, taking)) return YIELD;
    if (off) settle(w, w->nsplits - 1); /* after the split that calls, so that does not move */
    go_to(w, (s32)target[TARGET_ENTRY]);
    return JUMPED;
}

static Outcome op_return(Warp *w, const Ins *i, u32 lanes) {
    (void)i;
    const Call *c = w->join[current_split(w)->join].call;
    u8 *results[LANES];
    const s64 *to = results_of(c->i), *from = places_of(c->target) + c->i->mod[CALL_ARGUMENTS];
    u64 bytes = 0, offset = 0;
    for (s64 k = 0; k < c->i->mod[CALL_RESULTS]; k++) bytes += (u64)to[2 * k];
    EACH_LANE(lanes, { /* restoring may overwrite them */
        results[l] = malloc(bytes + 1);
        offset = 0;
        for (s64 k = 0; k < c->i->mod[CALL_RESULTS]; offset += (u64)to[2 * k++]) memcpy(results[l] + offset, local_of(w, l) + from[k], (size_t)to[2 * k]);
    });
    if (c->target[TARGET_RECURSIVE]) restore(w, c, lanes);
    pop(w, c, lanes);
    EACH_LANE(lanes, {
        offset = 0;
        for (s64 k = 0; k < c->i->mod[CALL_RESULTS]; offset += (u64)to[2 * k++]) memcpy(local_of(w, l) + to[2 * k + 1], results[l] + offset, (size_t)to[2 * k]);
        free(results[l]);
    });
    return_lanes(w, lanes);
    return JUMPED;
}

const HandlerEntry functions_handlers[] = {{"call", op_call}, {"return", op_return}, {0}};
