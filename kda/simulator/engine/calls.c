/* Calls to what the CUDA runtime provides on the device: vprintf, which prints at once, and __assertfail, which ends the launch.
 *
 * Both take their arguments in .param variables of the caller, which lie in its local memory: pointers to strings in global memory, and for
 * vprintf a pointer to the values, each aligned to its own size.
 */
#include "findings.h"
#include "memory.h"

#include <stdio.h>

static bool local_value(Warp *w, int lane, u64 at, void *to, u64 n) {
    u64 size = w->machine->program->local_bytes;
    if (!lies_within(at, n, 0, size)) return false;
    memcpy(to, w->local + lane * size + at, n);
    return true;
}

/* A string in global memory; "" after a finding. */
static const char *text_at(Warp *w, const Ins *i, int lane, u64 address) {
    Region *r;
    const char *p = (const char *)global_bytes(w, i, lane, address, 1, 1, false, &r);
    if (!p) return "";
    u64 room = r->address + r->size - address;
    if (!memchr(p, 0, room)) {
        find(w, i, lane, OUT_OF_BOUNDS, address, room, "a string that does not end");
        return "";
    }
    return p;
}

typedef struct {
    Warp *w;
    const Ins *i;
    int lane;
    u64 at; /* of the next value, in local memory */
} Values;

static u64 next_value(Values *v, u64 size) {
    u64 x = 0, at = (v->at + size - 1) & ~(size - 1);
    if (!local_value(v->w, v->lane, at, &x, size)) find(v->w, v->i, v->lane, OUT_OF_BOUNDS, at, size, "printf asks for more values than it was given");
    v->at = at + size;
    return x;
}

/* One conversion, from its '%' to its letter; where it ends. */
static const char *print_conversion(Values *v, const char *format) {
    char one[32];
    u64 n = 0, wide = 0;
    do {
        char c = format[n];
        one[n < sizeof one - 1 ? n : sizeof one - 1] = c;
        wide += c == 'l' || c == 'j' || c == 'z' || c == 't';
        n++;
    } while (format[n] && !strchr("diouxXcfFeEgGaAsp%", format[n]) && n < sizeof one - 2);
    char letter = one[n] = format[n];
    one[n + 1] = 0;
    if (!letter) return format + n;
    if (letter == '%')
        putchar('%');
    else if (strchr("fFeEgGaA", letter)) {
        u64 bits = next_value(v, 8);
        double x;
        memcpy(&x, &bits, 8);
        printf(one, x);
    } else if (letter == 's')
        printf(one, text_at(v->w, v->i, v->lane, next_value(v, 8)));
    else if (letter == 'p')
        printf("0x%llx", (unsigned long long)next_value(v, 8));
    else if (wide)
        printf(one, next_value(v, 8));
    else
        printf(one, (s32)next_value(v, 4));
    return format + n + 1;
}

/* mod: where the format's address, the address of the values and the result lie in local memory */
static Outcome op_printf(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 format_at = 0, values_at = 0;
        local_value(w, l, (u64)i->mod[0], &format_at, 8);
        local_value(w, l, (u64)i->mod[1], &values_at, 8);
        Values v = {w, i, l, values_at & 0x00ffffffffffffffu};
        for (const char *p = text_at(w, i, l, format_at); *p;) {
            if (*p == '%')
                p = print_conversion(&v, p);
            else
                putchar(*p++);
        }
    }
    fflush(stdout);
    return NEXT;
}

/* mod: where the addresses of the message, the file and the function, and the line, lie in local memory */
static Outcome op_assertfail(Warp *w, const Ins *i, u32 lanes) {
    int l = first_lane(lanes);
    u64 message = 0, file = 0;
    u32 line = 0;
    local_value(w, l, (u64)i->mod[0], &message, 8);
    local_value(w, l, (u64)i->mod[1], &file, 8);
    local_value(w, l, (u64)i->mod[2], &line, 4);
    find(w, i, l, BAD_OPERAND, 0, 0, "assertion failed: %.80s (%.50s:%u)", text_at(w, i, l, message), text_at(w, i, l, file), line);
    stop(w->machine);
    return YIELD;
}

const HandlerEntry calls_handlers[] = {{"printf", op_printf}, {"assertfail", op_assertfail}, {0}};
