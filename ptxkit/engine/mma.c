/* D = A B + C as the tensor cores round it.
 *
 * One step takes `terms` products and the accumulator: products are exact, every term is cut (towards zero) to F bits below the largest
 * exponent among them, the sum is exact, and the result is cut to f32 or rounded to nearest even in f16. A longer k is a chain of steps.
 *   sm_80, sm_89: 16 bytes of A a step, F = 24 (fp8: 13, and f32 results keep 13 bits); sm_90 and later: 32 bytes, F = 25, except fp8 in
 *   wgmma: 13. mma.sync has no fp8 of its own there: see multiply_converted; that of sm_120 has, which rounds like the others (assumed).
 * Scaled elements are products like others: a factor's power of two moves the exponent, its significand multiplies exactly. All 64 4-bit
 * elements of a row are one step.
 * A NaN, or inf - inf, gives 0x7fffffff (f16 0x7fff). Integers are exact; they wrap, or saturate once at the end.
 */
#include "mma.h"
#include "numerics.h"

enum { MAX_TERMS = 64, MAX_COLUMNS = 256, MIN_EXPONENT = -126, ZERO_EXPONENT = -1000 };
typedef enum { FINITE, PLUS_INFINITY, MINUS_INFINITY, NOT_A_NUMBER } Class;
typedef enum { IEEE, NAN_ONLY, ALL_FINITE } Specials;

typedef struct {
    u8 mantissa, exponent, unused; /* bits; bits below the mantissa that the hardware ignores */
    s16 bias;
    Specials specials;
    u8 bytes; /* size of an element in the tensor core: a step is counted in these */
} ElementFormat;

static const ElementFormat formats[] = {
    [MT_F16] = {10, 5, 0, 15, IEEE, 2},    [MT_BF16] = {7, 8, 0, 127, IEEE, 2},    [MT_TF32] = {10, 8, 13, 127, IEEE, 4},
    [MT_F32] = {23, 8, 0, 127, IEEE, 4},   [MT_E4M3] = {3, 4, 0, 7, NAN_ONLY, 1},  [MT_E5M2] = {2, 5, 0, 15, IEEE, 1},
    [MT_E2M3] = {3, 2, 0, 1, ALL_FINITE, 1}, [MT_E3M2] = {2, 3, 0, 3, ALL_FINITE, 1}, [MT_E2M1] = {1, 2, 0, 1, ALL_FINITE, 1},
};

/* value = significand * 2^(exponent - mantissa bits). A zero's exponent lies below all others, so that it never sets the largest one;
 * what is not finite counts as a zero, and its class tells. */
typedef struct {
    s32 significand, exponent;
    Class class;
} Number;

static inline __attribute__((always_inline)) Number decode(ElementFormat f, u32 bits, bool negate) {
    u32 top = (1u << f.exponent) - 1, ones = (1u << f.mantissa) - 1;
    bits >>= f.unused;
    u32 fraction = bits & ones, field = bits >> f.mantissa & top;
    bool negative = (bits >> (f.mantissa + f.exponent) & 1) != negate;
    bool special = field == top && (f.specials == IEEE || (f.specials == NAN_ONLY && fraction == ones));
    s32 magnitude = special ? 0 : (s32)(fraction | (u32)(field != 0) << f.mantissa);
    return (Number){.significand = negative ? -magnitude : magnitude,
                    .exponent = magnitude ? (s32)(field ? field : 1) - f.bias : ZERO_EXPONENT,
                    .class = !special ? FINITE : fraction ? NOT_A_NUMBER : negative ? MINUS_INFINITY : PLUS_INFINITY};
}

typedef struct {
    s32 fraction_bits, kept, terms; /* F; mantissa bits of an f32 result; products in a step */
} Model;

static Model model_of(const Tile *t) {
    s32 bytes = formats[t->a].bytes;
    bool coarse = bytes == 1 && (t->arch == 89 || (t->arch == 90 && t->wgmma));
    s32 bits = t->scales && t->a == MT_E2M1 && t->k % 64 == 0 ? 4 : 8 * bytes; /* containers of 8 bits count as such */
    return (Model){.fraction_bits = coarse ? 13 : t->arch >= 90 ? 25 : 24, .kept = coarse ? 13 : 23, .terms = (t->arch >= 90 ? 256 : 128) / bits};
}

/* ---- elements ----------------------------------------------------------------------------------------------------------- */

static s32 scale_mantissa(const Tile *t) { return t->scales && t->scales->type == MT_UE4M3 ? 3 : 0; }

static Number scaled(const Scales *s, Number x, u32 code) {
    bool power = s->type == MT_UE8M0;
    Number by = power ? (Number){1, (s32)code - 127, code == 0xff ? NOT_A_NUMBER : FINITE} : decode(formats[MT_E4M3], code & 0x7f, false);
    if (x.class || by.class) return (Number){0, ZERO_EXPONENT, by.class ? NOT_A_NUMBER : x.class};
    s32 significand = x.significand * by.significand;
    return (Number){significand, significand ? x.exponent + by.exponent : ZERO_EXPONENT, FINITE};
}

static Number element_a(const Tile *t, s32 m, s32 k) {
    Number x = decode(formats[t->a], t->A[(size_t)m * t->k + k], t->negate_a);
    return t->scales ? scaled(t->scales, x, t->scales->a[m * (t->k / t->scales->block) + k / t->scales->block]) : x;
}

static Number element_b(const Tile *t, s32 n, s32 k) {
    Number x = decode(formats[t->b], t->B[(size_t)n * t->k + k], t->negate_b);
    return t->scales ? scaled(t->scales, x, t->scales->b[n * (t->k / t->scales->block) + k / t->scales->block]) : x;
}

/* ---- results ------------------------------------------------------------------------------------------------------------ */

/* sum * 2^unit cut to f32 with that many mantissa bits; too large is inf */
static u32 to_f32(s64 sum, s32 unit, s32 kept) {
    if (!sum) return 0;
    u32 sign = sum < 0 ? 0x80000000u : 0;
    u64 magnitude = sum < 0 ? -(u64)sum : (u64)sum;
    s32 top = 63 - __builtin_clzll(magnitude), exponent = top + unit;
    if (exponent > 127) return sign | 0x7f800000u;
    s32 lowest = exponent < MIN_EXPONENT ? MIN_EXPONENT - unit - kept : top - kept; /* the lowest bit of sum that stays */
    if (lowest > 63) return sign;
    if (lowest > 0) magnitude = magnitude >> lowest << lowest;
    s32 up = unit - (exponent < MIN_EXPONENT ? MIN_EXPONENT - 23 : exponent - 23); /* to units of the result's last place */
    u32 mantissa = (u32)(up >= 0 ? magnitude << up : magnitude >> -up);
    return sign | (exponent < MIN_EXPONENT ? mantissa : ((u32)(exponent + 126) << 23) + mantissa);
}

/* sum * 2^unit rounded to the nearest f16, ties to even */
static u32 to_f16(s64 sum, s32 unit) {
    if (!sum) return 0;
    u32 sign = sum < 0 ? 0x8000u : 0;
    u64 magnitude = sum < 0 ? -(u64)sum : (u64)sum;
    s32 exponent = 63 - __builtin_clzll(magnitude) + unit;
    if (exponent > 15) return sign | 0x7c00u;
    if (exponent < -26) return sign;
    if (exponent < -14) exponent = -14;
    s32 down = exponent - 10 - unit;
    u32 rounded;
    if (down <= 0)
        rounded = (u32)(magnitude << -down);
    else {
        u64 kept = magnitude >> down, half = 1ull << (down - 1), rest = magnitude & ((1ull << down) - 1);
        rounded = (u32)(kept + (rest > half || (rest == half && kept & 1)));
    }
    return sign | (((u32)(exponent + 14) << 10) + rounded); /* a carry moves into the exponent, and on to inf */
}

/* One step's part of B, and what a row of D is made of: [column] throughout. */
typedef struct {
    s32 significand[MAX_TERMS][MAX_COLUMNS], exponent[MAX_TERMS][MAX_COLUMNS];
    u8 special[MAX_COLUMNS]; /* is any of the column's terms not finite? */
    s32 first, columns;
} Columns;

typedef struct {
    s32 significand[MAX_COLUMNS], exponent[MAX_COLUMNS]; /* the accumulator's */
    s32 largest[MAX_COLUMNS];                            /* exponent of all terms */
    s64 sum[MAX_COLUMNS];                                /* in units of 2^(largest - F) */
    u8 special[MAX_COLUMNS];
} Row;

/* The loops over columns below are the simulator's hottest: they are written to vectorise, without branches. */
#define FAST __attribute__((optimize("O3")))

static FAST bool decode_columns(const Tile *t, Columns *c, s32 k, s32 terms) { /* is any of them not finite? */
    const ElementFormat format = formats[t->b];
    const bool negate = t->negate_b;
    const s32 columns = c->columns, depth = t->k;
    u32 any = 0;
    memset(c->special, 0, columns);
    for (s32 e = 0; e < terms; e++) {
        const u32 *b = t->B + (size_t)c->first * depth + k + e;
        s32 *significand = c->significand[e], *exponent = c->exponent[e];
        for (s32 n = 0; n < columns; n++) {
            Number x = t->scales ? element_b(t, c->first + n, k + e) : decode(format, b[n * depth], negate);
            significand[n] = x.significand;
            exponent[n] = x.exponent;
            c->special[n] |= x.class != FINITE;
            any |= x.class;
        }
    }
    return any;
}

static FAST bool decode_accumulator(const Tile *t, Row *r, const u32 *c, s32 columns) {
    const ElementFormat format = formats[t->d];
    u32 any = 0;
    for (s32 n = 0; n < columns; n++) {
        Number x = decode(format, c ? c[n] : 0, false);
        r->significand[n] = x.significand;
        r->exponent[n] = x.exponent;
        r->special[n] = x.class != FINITE;
        r->largest[n] = x.exponent < MIN_EXPONENT ? MIN_EXPONENT : x.exponent;
        any |= x.class;
    }
    return any;
}

static FAST void find_largest(const s32 *a_exponent, const Columns *c, s32 terms, Row *r) {
    const s32 columns = c->columns;
    s32 *largest = r->largest;
    for (s32 e = 0; e < terms; e++) {
        const s32 *exponent = c->exponent[e];
        for (s32 n = 0; n < columns; n++) {
            s32 x = a_exponent[e] + exponent[n];
            largest[n] = largest[n] > x ? largest[n] : x;
        }
    }
}

/* Each product is below 2^27 in the unit, so sixteen fit in 32 bits; with factors that are no powers of two below 2^29, so that four do. */
static FAST void add_products(const s32 *a, const s32 *a_exponent, const Columns *c, s32 terms, s32 together, Row *r) {
    const s32 columns = c->columns, *largest = r->largest;
    for (s32 from = 0; from < terms; from += together) {
        s32 part[MAX_COLUMNS];
        s32 to = from + together < terms ? from + together : terms;
        memset(part, 0, columns * sizeof *part);
        for (s32 e = from; e < to; e++) {
            const s32 *exponent = c->exponent[e], *b = c->significand[e];
            if (!a[e]) continue;
            for (s32 n = 0; n < columns; n++) {
                s32 product = a[e] * b[n], down = largest[n] - a_exponent[e] - exponent[n], sign = product >> 31;
                u32 cut = (u32)((product ^ sign) - sign) >> (down < 31 ? down : 31);
                part[n] += ((s32)cut ^ sign) - sign;
            }
        }
        for (s32 n = 0; n < columns; n++) r->sum[n] += part[n];
    }
}

static FAST void start_sums(Row *r, s32 columns, s32 mantissa, s32 fraction_bits) { /* with the accumulator, cut like the products */
    for (s32 n = 0; n < columns; n++) {
        s32 sign = r->significand[n] >> 31, down = r->largest[n] - r->exponent[n] + mantissa;
        u64 magnitude = (u64)(u32)((r->significand[n] ^ sign) - sign) << fraction_bits;
        r->sum[n] = ((s64)(magnitude >> (down < 63 ? down : 63)) ^ sign) - sign;
    }
}

/* All sums as f32 at once: as doubles they are exact, and to cut one is to clear its low bits. False if any is too large or subnormal. */
static FAST bool all_to_f32(const Row *r, u32 *d, s32 columns, s32 fraction_bits, s32 kept) {
    u64 stay = ~0ull << (52 - kept);
    u32 bad = 0;
    for (s32 n = 0; n < columns; n++) {
        double unit = bits_double((u64)(r->largest[n] - fraction_bits + 1023) << 52), exact = (double)r->sum[n] * unit;
        double cut = bits_double(double_bits(exact) & stay), size = cut < 0 ? -cut : cut;
        bad |= (size < 0x1p-126) & (cut != 0);
        bad |= size >= 0x1p128;
        d[n] = float_bits((float)cut);
    }
    return !bad;
}

/* A sum with a NaN or an infinity among its operands */
static u32 special_sum(const Tile *t, s32 m, s32 n, s32 k, s32 terms, u32 c) {
    Class start = decode(formats[t->d], c, false).class;
    bool nan = start == NOT_A_NUMBER, plus = start == PLUS_INFINITY, minus = start == MINUS_INFINITY, half = t->d == MT_F16;
    for (s32 e = 0; e < terms && !nan; e++) {
        Number a = element_a(t, m, k + e), b = element_b(t, n, k + e);
        if (!a.class && !b.class) continue;
        nan = a.class == NOT_A_NUMBER || b.class == NOT_A_NUMBER || (!a.class && !a.significand) || (!b.class && !b.significand);
        bool negative = (a.class == MINUS_INFINITY || a.significand < 0) != (b.class == MINUS_INFINITY || b.significand < 0);
        *(negative ? &minus : &plus) = true;
    }
    if (nan || (plus && minus)) return half ? 0x7fff : 0x7fffffff;
    return (half ? 0x7c00u : 0x7f800000u) | (minus ? half ? 0x8000u : 0x80000000u : 0);
}

static void multiply_row(const Tile *t, const Model *model, const Columns *columns, bool special_columns, s32 m, s32 k, s32 terms,
                         const u32 *accumulator) {
    const size_t index = (size_t)m * t->n + columns->first;
    const u32 *c = accumulator ? accumulator + index : NULL;
    const s32 F = model->fraction_bits, up = F - formats[t->a].mantissa - formats[t->b].mantissa - 2 * scale_mantissa(t); /* products in units of 2^(exponent - F) */
    s32 a[MAX_TERMS], a_exponent[MAX_TERMS];
    bool special_row = false;
    Row row;
    u32 *d = t->D + index;
    for (s32 e = 0; e < terms; e++) {
        Number x = element_a(t, m, k + e);
        a[e] = x.significand * (1 << up);
        a_exponent[e] = x.exponent;
        special_row |= x.class != FINITE;
    }
    bool special = decode_accumulator(t, &row, c, columns->columns) || special_row || special_columns;
    find_largest(a_exponent, columns, terms, &row);
    start_sums(&row, columns->columns, formats[t->d].mantissa, F);
    add_products(a, a_exponent, columns, terms, scale_mantissa(t) ? 4 : 16, &row);
    if (!special && t->d == MT_F32 && all_to_f32(&row, d, columns->columns, F, model->kept)) return;
    for (s32 n = 0; n < columns->columns; n++) {
        s32 unit = row.largest[n] - F;
        if (special && (special_row || columns->special[n] || row.special[n]))
            d[n] = special_sum(t, m, columns->first + n, k, terms, c ? c[n] : 0);
        else
            d[n] = t->d == MT_F16 ? to_f16(row.sum[n], unit) : to_f32(row.sum[n], unit, model->kept);
    }
}

static void multiply_floats(const Tile *t) {
    Model model = model_of(t);
    Columns columns;
    for (columns.first = 0; columns.first < t->n; columns.first += MAX_COLUMNS) {
        columns.columns = t->n - columns.first < MAX_COLUMNS ? t->n - columns.first : MAX_COLUMNS;
        const u32 *accumulator = t->C;
        for (s32 k = 0; k < t->k; k += model.terms) {
            s32 terms = t->k - k < model.terms ? t->k - k : model.terms;
            bool special = decode_columns(t, &columns, k, terms);
            for (s32 m = 0; m < t->m; m++) multiply_row(t, &model, &columns, special, m, k, terms, accumulator);
            accumulator = t->D;
        }
    }
}

static s32 integer(MatrixType type, u32 bits) { return type == MT_S8 ? (s8)bits : type == MT_S4 ? (s32)(bits << 28) >> 28 : (u8)bits; }

static FAST void multiply_integers(const Tile *t) {
    s32 (*b)[t->n] = malloc((size_t)t->k * sizeof *b); /* [k][n] */
    s32 *sum = malloc(t->n * sizeof *sum);
    for (s32 n = 0; n < t->n; n++)
        for (s32 k = 0; k < t->k; k++) b[k][n] = integer(t->b, t->B[(size_t)n * t->k + k]);
    for (s32 m = 0; m < t->m; m++) {
        memset(sum, 0, t->n * sizeof *sum);
        for (s32 k = 0; k < t->k; k++) {
            s32 a = integer(t->a, t->A[(size_t)m * t->k + k]);
            if (t->exclusive)
                for (s32 n = 0; n < t->n; n++) sum[n] += a ^ b[k][n];
            else
                for (s32 n = 0; n < t->n; n++) sum[n] += a * b[k][n];
        }
        for (s32 n = 0; n < t->n; n++) {
            size_t index = (size_t)m * t->n + n;
            s64 all = (s64)(t->C ? (s32)t->C[index] : 0) + sum[n];
            if (t->saturate) all = all > INT32_MAX ? INT32_MAX : all < INT32_MIN ? INT32_MIN : all;
            t->D[index] = (u32)all;
        }
    }
    free(b);
    free(sum);
}

static u32 as_f16(MatrixType type, u32 bits) { /* exact */
    if (type == MT_E5M2) return bits << 8;
    Number x = decode(formats[type], bits, false);
    return x.class != FINITE ? 0x7fff : (bits & 0x80) << 8 | to_f16(abs(x.significand), x.exponent - formats[type].mantissa);
}

static u32 add_nearest(MatrixType type, u32 a, u32 b) {
    if (type == MT_F16) return float_to_half(half_to_float((u16)a) + half_to_float((u16)b));
    float sum = bits_float(a) + bits_float(b);
    return sum != sum ? 0x7fffffffu : float_bits(sum);
}

/* fp8 of mma.sync on sm_90, as an H200 does it: the elements become f16; those of k % 4 < 2 are multiplied and summed from zero, those of
 * k % 4 >= 2 after them, in the format of D; then C is added to nearest. That sm_100 does the same is assumed. */
static void multiply_converted(const Tile *t) {
    s32 half = t->k / 2;
    size_t cells = (size_t)t->m * t->n;
    u32 *A = malloc((size_t)t->m * half * sizeof *A), *B = malloc((size_t)t->n * half * sizeof *B), *sum = malloc(cells * sizeof *sum);
    for (s32 part = 0; part < 2; part++) {
        for (s32 k = 0; k < half; k++) {
            s32 from = k / 2 * 4 + k % 2 + 2 * part;
            for (s32 m = 0; m < t->m; m++) A[m * half + k] = as_f16(t->a, t->A[(size_t)m * t->k + from]);
            for (s32 n = 0; n < t->n; n++) B[n * half + k] = as_f16(t->b, t->B[(size_t)n * t->k + from]);
        }
        multiply_floats(&(Tile){.arch = t->arch, .a = MT_F16, .b = MT_F16, .d = t->d, .m = t->m, .n = t->n, .k = half, .A = A, .B = B,
                                .C = part ? sum : NULL, .D = sum});
    }
    for (size_t i = 0; i < cells; i++) t->D[i] = add_nearest(t->d, sum[i], t->C ? t->C[i] : 0);
    free(A);
    free(B);
    free(sum);
}

void multiply_tile(const Tile *t) {
    if (t->d == MT_S32)
        multiply_integers(t);
    else if (t->by_warp && t->arch >= 90 && t->arch < 120 && formats[t->a].bytes == 1)
        multiply_converted(t);
    else
        multiply_floats(t);
}
