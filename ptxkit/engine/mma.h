/* D = A B + C on raw bits: what mma.sync, wgmma and tcgen05.mma share. mma.c holds the models of how each arch rounds. */
#pragma once
#include "instructions.h"

typedef enum { MT_F16, MT_BF16, MT_TF32, MT_F32, MT_F64, MT_E4M3, MT_E5M2, MT_E2M3, MT_E3M2, MT_E2M1, MT_U8, MT_S8, MT_S32,
               MT_U4, MT_S4, MT_B1, MT_UE8M0, MT_UE4M3 } MatrixType;

/* Factors of `block` neighbours in k each: D = (A * A's) (B * B's) + C */
typedef struct {
    MatrixType type; /* MT_UE8M0 or MT_UE4M3 */
    int block;
    const u32 *a, *b; /* [m][k / block], [n][k / block] */
} Scales;


typedef struct {
    u32 arch;            /* as of a launch */
    bool wgmma;          /* sm_90: fp8 rounds differently in wgmma */
    bool by_warp;        /* mma.sync */
    MatrixType a, b, d;  /* d, the type of C and D: MT_F32, MT_F16 or MT_S32 */
    int m, n, k;
    const u32 *A;        /* [m][k], one element in each word's low bits */
    const u32 *B;        /* [n][k] */
    const u32 *C;        /* [m][n]; NULL: zero. May be D itself */
    u32 *D;              /* [m][n] */
    bool negate_a, negate_b, saturate;
    bool exclusive;      /* bits: a ^ b in the place of a b */
    const Scales *scales; /* NULL: none */
} Tile;

void multiply_tile(const Tile *t);
