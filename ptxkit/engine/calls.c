/* Calls to what the CUDA runtime provides on the device: vprintf, which prints at once, and __assertfail, which ends the launch.
 *
 * Both take their arguments in .param variables of the caller, which lie in its local memory: pointers to strings in global memory, and for
 * vprintf a pointer to the values, each aligned to its own size.
 */
#include "findings.h"
#include "memory.h"

#include <stdio.h>

static bool local_value(Warp *w, int lane, u64 offset, void *to, u64 n) {
    u64 size = w->machine->program->local_bytes;
    if (!lies_within(offset, n, 0, size)) return false;
    memcpy(to, w->local + lane * size + offset, n);
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
    u64 offset; /* where the next value is in local memory */
} Values;

static u64 next_value(Values *v, u64 size) {
    u64 x = 0, offset = (v->offset + size - 1) & ~(size - 1);
    if (!local_value(v->w, v->lane, offset, &x, size)) find(v->w, v->i, v->lane, OUT_OF_BOUNDS, offset, size, "printf asks for more values than it was given");
    v->offset = offset + size;
    return x;
}

/* ---- printf: %[flags][width][.precision][size]letter ------------------------------------------------------------------------ */

enum { MOST_WIDE = 4096 }; /* characters that a width or a precision may ask for */

/* The number at *p, digits or `*` for one of the values; without either `absent`. */
static s32 number_at(Values *v, const char **p, s32 absent) {
    s64 n = absent;
    if (**p == '*') {
        ++*p;
        n = (s32)next_value(v, 4);
    } else if (**p >= '0' && **p <= '9')
        for (n = 0; **p >= '0' && **p <= '9'; ++*p)
            if (n <= MOST_WIDE) n = 10 * n + (**p - '0');
    if (n >= -MOST_WIDE && n <= MOST_WIDE) return (s32)n;
    find(v->w, v->i, v->lane, BAD_OPERAND, 0, 0, "printf: a width or precision of more than %d characters", MOST_WIDE);
    return absent;
}

/* One conversion, from its '%' on; where it ends. What the host's printf gets is put together here: nothing of the kernel's text but flags. */
static const char *print_conversion(Values *v, const char *format) {
    static const char known[] = "-+ #0";
    const char *p = format + 1;
    char flags[sizeof known] = "", host[32];
    for (; *p && strchr(known, *p); p++)
        if (!strchr(flags, *p)) strncat(flags, p, 1);
    s32 width = number_at(v, &p, 0), precision = -1; /* -1: as if there were none */
    if (*p == '.') p++, precision = number_at(v, &p, 0);
    int halves = 0, wide = 0;
    for (; *p && strchr("hlLjzt", *p); p++) halves += *p == 'h', wide += *p != 'h' && *p != 'L';
    const char letter = *p;
    if (letter && strchr("diouxX", letter)) {
        snprintf(host, sizeof host, "%%%s*.*%s%c", flags, wide ? "ll" : halves > 1 ? "hh" : halves ? "h" : "", letter);
        if (wide)
            printf(host, width, precision, next_value(v, 8));
        else
            printf(host, width, precision, (s32)next_value(v, 4));
    } else if (letter && strchr("fFeEgGaA", letter)) {
        u64 bits = next_value(v, 8);
        double x;
        memcpy(&x, &bits, 8);
        snprintf(host, sizeof host, "%%%s*.*%c", flags, letter);
        printf(host, width, precision, x);
    } else if (letter == 's')
        printf(strchr(flags, '-') ? "%-*.*s" : "%*.*s", width, precision, text_at(v->w, v->i, v->lane, next_value(v, 8)));
    else if (letter == 'c')
        printf(strchr(flags, '-') ? "%-*c" : "%*c", width, (s32)next_value(v, 4));
    else if (letter == 'p') {
        snprintf(host, sizeof host, "0x%llx", (unsigned long long)next_value(v, 8));
        printf(strchr(flags, '-') ? "%-*s" : "%*s", width, host);
    } else if (letter == '%')
        putchar('%');
    else { /* printed as it is */
        find(v->w, v->i, v->lane, BAD_OPERAND, 0, 0, "printf: `%.*s` is no conversion; there are %%d i o u x X c s p f F e E g G a A and %%%%",
             (int)(p - format) + (letter != 0), format);
        putchar('%');
        return format + 1;
    }
    return p + 1;
}

static Outcome op_printf(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 format_at = 0, values_at = 0;
        local_value(w, l, (u64)i->mod[PRINTF_FORMAT], &format_at, 8);
        local_value(w, l, (u64)i->mod[PRINTF_VALUES], &values_at, 8);
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

static Outcome op_assertfail(Warp *w, const Ins *i, u32 lanes) {
    int l = first_lane(lanes);
    u64 message = 0, file = 0;
    u32 line = 0;
    local_value(w, l, (u64)i->mod[ASSERTFAIL_MESSAGE], &message, 8);
    local_value(w, l, (u64)i->mod[ASSERTFAIL_FILE], &file, 8);
    local_value(w, l, (u64)i->mod[ASSERTFAIL_LINE], &line, 4);
    find(w, i, l, BAD_OPERAND, 0, 0, "assertion failed: %.80s (%.50s:%u)", text_at(w, i, l, message), text_at(w, i, l, file), line);
    stop(w->machine);
    return YIELD;
}

const HandlerEntry calls_handlers[] = {{"printf", op_printf}, {"assertfail", op_assertfail}, {0}};
