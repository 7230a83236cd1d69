// Numbers of one token: powers of two, the gate, beta, l2norm.  float32 in and out.
//
//   given      g2 = log2(e) g
//   softplus   g2 = -log2(e) e^A softplus(x)             x = g + dt_bias
//   bounded    g2 = log2(e) lower_bound sigmoid(e^A x)
//
// e^A and e^A x are kept finite.  -inf is a decay like any other: nothing here subtracts two of them.
#pragma once

typedef long long i64;
typedef unsigned int u32;

enum Gate { GIVEN, SOFTPLUS, BOUNDED };
enum Beta { AS_IT_IS, SIGMOID, TWICE_SIGMOID };

// How many numbers g has for a token and head, and which of them channel d has.  Macros leave no trace in PTX.
#if PER_HEAD
#define GATES 1
#define OF_GATE(d) 0
#else
#define GATES HEAD_K
#define OF_GATE(d) d
#endif

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOG2_E_LOW = 1.925963033500011e-8f;  // what float32 leaves out of it
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LARGEST = 3.4028234663852886e38f;
constexpr float NORM_EPS = 1e-6f;

// 2^x within two ulps; 0 below 2^-126.
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within an ulp; 0 for infinity.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x.  x log2(e) in two parts: rounded to one, an exponent of 20 would cost ten ulps.  From 2^128 on y is infinity,
// which the low part would turn into nan.
__device__ __forceinline__ float exp_(float x) {
  const float high = x * LOG2_E;
  const float low = fmaf(x, LOG2_E_LOW, fmaf(x, LOG2_E, -high));
  const float y = exp2_(high);
  return fabsf(high) < 128.0f ? fmaf(y, low * LN_2, y) : y;
}

__device__ __forceinline__ float finite(float x) {
  return x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp_(-x)); }

// sigmoid(x) sigmoid(-x)
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = exp_(-fabsf(x)), s = reciprocal(1.0f + e);
  return e * s * s;
}

// log(1 + e) for e in [0, 1]: twice atanh(s) with s = e / (2 + e) <= 1/3, a series good to float32.
__device__ __forceinline__ float log1p_(float e) {
  const float s = e * reciprocal(2.0f + e), t = s * s;
  float p = 1.0f / 13.0f;
  p = fmaf(p, t, 1.0f / 11.0f);
  p = fmaf(p, t, 1.0f / 9.0f);
  p = fmaf(p, t, 1.0f / 7.0f);
  p = fmaf(p, t, 1.0f / 5.0f);
  p = fmaf(p, t, 1.0f / 3.0f);
  return 2.0f * fmaf(s * t, p, s);
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1p_(exp_(-fabsf(x))); }

// g2 of logits with their bias, or of given decays.
template <int GATE>
__device__ __forceinline__ float log2_decay(float x, float rate, float lower_bound) {
  if (GATE == GIVEN) return LOG2_E * x;
  if (GATE == SOFTPLUS) return -LOG2_E * (rate * softplus(x));
  return LOG2_E * lower_bound * sigmoid(rate * x);
}

// Back through the gate: the gradients of a logit and of A_log by one token.
template <int GATE>
__device__ __forceinline__ void log2_decay_bwd(float dg2, float x, float rate, float lower_bound, float& dx,
                                               float& of_A) {
  if (GATE == GIVEN) {
    dx = dg2, of_A = 0.0f;
  } else if (GATE == SOFTPLUS) {
    const float e = exp_(-fabsf(x)), s = reciprocal(1.0f + e);
    dx = -(rate * ((x < 0.0f ? e * s : s) * dg2));
    of_A = -(finite(rate * (fmaxf(x, 0.0f) + log1p_(e))) * dg2);
  } else {
    const float y = finite(rate * x), dy = dg2 * (lower_bound * sigmoid_slope(y));
    dx = dy * rate, of_A = dy * y;
  }
}

template <int BETA>
__device__ __forceinline__ float step_size(float beta) {
  if (BETA == AS_IT_IS) return beta;
  return (BETA == TWICE_SIGMOID ? 2.0f : 1.0f) * sigmoid(beta);
}

__device__ __forceinline__ float inverse_norm(float sum_of_squares) { return rsqrtf(sum_of_squares + NORM_EPS); }
