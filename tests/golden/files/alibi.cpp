// ============================================================================
// afc: attention `alibi_lm` for target cpu
// source    alibi.attn:2
// blocks    scaled_dot_product(scale = Dqk ** -0.5), alibi(slope = slope) > causal > softmax
// tensors   q[B, H, M, 64], k[B, Hk, N, 64], v[B, Hk, N, 64], o[B, H, M, 64] float32
// options   slope[H] float
// schedule  96 queries in lanes x 64 keys; dK, dV: 96 keys in lanes x 64 queries
// rebuild   afc compile alibi.attn --emit cpp
// edit      templates/cpu, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "cpu/call.hpp"
#include "cpu/softmax.hpp"
#include "cpu/walk.hpp"
#include "host/status.h"

namespace {

// ---- types and constants ---------------------------------------------------

using Element = float;  // in memory
using Real = float;  // in tiles and sums
using afc::Run;
using Rows = afc::Matrix<const Element>;  // of one head

constexpr int HEAD_QK = 64;  // width of a row of q and k
constexpr int HEAD_V = 64;  // width of a row of v and o
constexpr int PITCH_QK = afc::round_up(HEAD_QK, afc::STREAM_ROWS);  // of rows in tiles
constexpr int PITCH_V = afc::round_up(HEAD_V, afc::STREAM_ROWS);
constexpr int LANES = afc::Panel<Real>::lanes;

constexpr int QUERY_TILE = 96;  // forward and dQ: queries in lanes,
constexpr int KEY_TILE = 64;  // keys streamed
constexpr int STREAM_QUERY_TILE = 64;  // dK and dV: queries streamed,
constexpr int LANE_KEY_TILE = 96;  // keys in lanes
static_assert(LANE_KEY_TILE % LANES == 0, "keys in lanes fill whole panels");
static_assert(STREAM_QUERY_TILE % afc::STREAM_ROWS == 0, "streamed queries come in groups");
static_assert(QUERY_TILE % LANES == 0, "queries in lanes fill whole panels");
static_assert(KEY_TILE % afc::STREAM_ROWS == 0, "streamed keys come in groups");

constexpr Real SCALE_LOG2 = 0.18033688011112042f;  // weights are exp2(SCALE_LOG2 * (score - maximum))
constexpr Real SOFTMAX_SCALE = 0.125f;  // the same in units of the natural logarithm
constexpr Real GRADIENT_SCALE = 0.125f;  // constant factor of d score / d (q k)
constexpr int CAPTURED = 1;  // captured tensors

// ---- building blocks -------------------------------------------------------

// Terms that depend on neither the query nor the key.
struct Item {
  Real slope_h;
};

AFC_FN Item load_item(const afc_args &args, int b, int h) {
  return Item{afc::read<Real>(args.captured[0], h)};
}

// scaled_dot_product(scale = Dqk ** -0.5), alibi(slope = slope)  [alibi.attn:3]
// Linear penalty on distance, one slope per head. ALiBi, arXiv:2108.12409; slopes 2^(-8(h+1)/H).
AFC_FN Real alibi(Real s, int i, int j, Real slope_h) {
  return s - Real(8.0) * slope_h * Real(i - j);
}

AFC_FN Real score(Real s, int m, int n, int i, int j, const Item &item, const afc_args &args) {
  s = alibi(s, i, j, item.slope_h);
  return s;
}

// causal  [alibi.attn:3]
// Keys at or before the query's own position.
AFC_FN bool causal(int i, int j) {
  return j <= i;
}

AFC_FN bool keep(int m, int n, int i, int j, const Item &item, const afc_args &args) {
  return causal(i, j);
}

// Keys that queries m_first..m_last see.
AFC_FN Run key_run(const afc_args &args, int m_first, int m_last) {
  const int64_t i_first = m_first + args.q_origin, i_last = m_last + args.q_origin;
  Limits limits(args.k_origin, args.N);
  limits.at_most(i_first, i_last);
  return limits.run(false);
}

// Queries that see keys n_first..n_last.
AFC_FN Run query_run(const afc_args &args, int n_first, int n_last) {
  const int64_t j_first = n_first + args.k_origin, j_last = n_last + args.k_origin;
  Limits limits(args.q_origin, args.M);
  limits.at_least(j_first, j_last);
  return limits.run(false);
}

// ---- rows in lanes ---------------------------------------------------------

// Rows of the stationary side of one panel. Lanes beyond the tensor repeat its last row; what they compute is
// never stored.
struct Lanes {
  int row[LANES];
  int position[LANES];
};

AFC_FN void set_lanes(Lanes &lanes, int64_t first, int64_t rows, int64_t origin) {
  for (int c = 0; c < LANES; ++c) {
    lanes.row[c] = int(afc::min(first + c, rows - 1));
    lanes.position[c] = int(lanes.row[c] + origin);
  }
}

// ---- workspace -------------------------------------------------------------

struct Workspace {
  Real *delta;
  void *scratch;  // of all threads
  int64_t bytes;
};

// ---- forward ---------------------------------------------------------------

struct alignas(64) ForwardScratch {
  Real q[QUERY_TILE / LANES][HEAD_QK][LANES];  // Q^T
  Real o[QUERY_TILE / LANES][PITCH_V][LANES];  // O^T, not yet divided by the row sum
  Real maximum[QUERY_TILE / LANES][LANES];     // of the scores of a row
  Real sum[QUERY_TILE / LANES][LANES];         // of its weights
  Real k[KEY_TILE][PITCH_QK];
  Real v[KEY_TILE][PITCH_V];
  Real s[KEY_TILE][LANES];  // S^T, then P^T
  Real rescale[LANES];
  Real row[PITCH_QK + PITCH_V];
  Lanes lanes[QUERY_TILE / LANES];
};

// Raw scores of keys n_first .. n_first + count - 1 -> scores, -infinity where masked.
AFC_FN void apply_blocks(Real (*S)[LANES], int n_first, int count, bool full, const Lanes &lanes,
                         const Item &item, const afc_args &args) {
  for (int r = 0; r < count; ++r) {
    const int n = n_first + r, j = int(n + args.k_origin);
    if (full) {
#pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        S[r][c] = score(S[r][c], lanes.row[c], n, lanes.position[c], j, item, args);
      }
      continue;
    }
#pragma omp simd
    for (int c = 0; c < LANES; ++c) {
      const int m = lanes.row[c], i = lanes.position[c];
      const bool kept = keep(m, n, i, j, item, args);
      S[r][c] = kept ? score(S[r][c], m, n, i, j, item, args) : afc::minus_infinity<Real>();
    }
  }
}

// Divides by the row sum, rounds once and stores O and LSE of one row.
AFC_FN void store_output(const afc_args &args, int64_t b, int64_t h, int64_t m, const ForwardScratch &t,
                         int p, int c, Real *row) {
  const Real sum = t.sum[p][c];
  afc::gather_lane(row, t.o[p][0], c, HEAD_V);
  for (int d = 0; d < HEAD_V; ++d) row[d] = sum == Real(0) ? Real(0) : row[d] / sum;
  afc::store_row(afc::matrix<Element>(args.o, b, h).row(m), row, HEAD_V);
  *afc::matrix<Real>(args.lse, b, h).row(m) = afc::log_sum_exp(SOFTMAX_SCALE, t.maximum[p][c], sum);
}

// One query tile of one head.
AFC_FN void forward_tile(const afc_args &call, int64_t task, ForwardScratch &t) {
  const int64_t tiles = afc::ceil_div(call.M, QUERY_TILE);
  const int64_t b = task / tiles / call.Hq, h = task / tiles % call.Hq, h_kv = h / (call.Hq / call.Hk);
  afc_args own;
  const afc_args &args = afc::args_of_batch(call, b, own);
  const int64_t first = (tiles - 1 - task % tiles) * QUERY_TILE;  // last rows, the longest if causal, first
  const int rows = int(afc::min(int64_t(QUERY_TILE), args.M - first));
  const int panels = int(afc::ceil_div(rows, LANES));
  const Rows Q = afc::matrix<const Element>(args.q, b, h);
  const Rows K = afc::matrix<const Element>(args.k, b, h_kv), V = afc::matrix<const Element>(args.v, b, h_kv);
  const Item item = load_item(args, int(b), int(h));

  afc::load_panels(t.q[0][0], t.row, Q, first, rows, HEAD_QK);
  std::memset(t.o, 0, sizeof t.o);
  std::memset(t.sum, 0, sizeof t.sum);
  for (int p = 0; p < panels; ++p) {
    for (Real &maximum : t.maximum[p]) maximum = afc::minus_infinity<Real>();
    set_lanes(t.lanes[p], first + p * LANES, args.M, args.q_origin);
  }

  const Run run = afc::run_below(key_run(args, int(first), int(first + rows - 1)), afc::key_count(args, b));
  afc::walk(run, KEY_TILE, [&](int n_first, int count, bool full) {
    afc::load_tile(t.k[0], PITCH_QK, K, n_first, count, HEAD_QK);
    const bool finite = afc::load_tile(t.v[0], PITCH_V, V, n_first, count, HEAD_V);
    for (int p = 0; p < panels; ++p) {
      // ---- scores: S^T = K Q^T ----
      afc::multiply(t.s[0], t.k[0], PITCH_QK, t.q[p][0], count, HEAD_QK);
      apply_blocks(t.s, n_first, count, full, t.lanes[p], item, args);
      // ---- online softmax ----
      afc::online_softmax(t.s[0], count, SCALE_LOG2, t.maximum[p], t.sum[p], t.rescale);
      afc::round_row<Element>(t.s[0], count * LANES);
      // ---- output: O^T = O^T * rescale + V^T P^T ----
      afc::accumulate_tile(t.o[p][0], t.rescale, t.v[0], finite, PITCH_V, t.s[0], count, PITCH_V);
    }
  });

  for (int r = 0; r < rows; ++r) store_output(args, b, h, first + r, t, r / LANES, r % LANES, t.row);
}

// ---- backward: elements ----------------------------------------------------

// S: raw score -> weight P. dP -> dS = P (dP - delta). `offset` is LSE in
// units of log2.
AFC_FN void differentiate(Real &S, Real &dP, Real offset, Real delta, bool kept, int m, int n, int i, int j,
                          const Item &item, const afc_args &args) {
  const Real s = S;
  const Real x = !kept ? afc::minus_infinity<Real>() : score(s, m, n, i, j, item, args);
  const Real weight = afc::exp2_weight(SCALE_LOG2 * x - offset);
  const Real dS = weight * (dP - delta);
  S = weight;
  dP = weight == Real(0) ? Real(0) : dS;  // whatever dP is where nothing was kept
}

// delta = rowsum(dO * O) - dLSE of ROW_BLOCK rows. Summed in the order of afc::multiply, so that dP - delta
// is exactly 0 for a row with one key.
constexpr int ROW_BLOCK = 64;

AFC_FN void delta_rows(const afc_args &args, int64_t task, Real *delta) {
  const int64_t blocks = afc::ceil_div(args.M, ROW_BLOCK);
  const int64_t head = task / blocks, b = head / args.Hq, h = head % args.Hq;
  const int64_t first = task % blocks * ROW_BLOCK, last = afc::min(first + ROW_BLOCK, args.M);
  const Rows O = afc::matrix<const Element>(args.o, b, h), dO = afc::matrix<const Element>(args.d_o, b, h);
  for (int64_t m = first; m < last; ++m) {
    Real o[HEAD_V], d_o[HEAD_V], sum = 0;
    afc::load_row(o, O.row(m), HEAD_V);
    afc::load_strided_row(d_o, dO, m, HEAD_V);
    for (int d = 0; d < HEAD_V; ++d) sum = std::fma(o[d], d_o[d], sum);
    const Real dlse = args.dlse.data ? *afc::matrix<const Real>(args.dlse, b, h).row(m) : Real(0);
    delta[head * args.M + m] = sum - dlse;
  }
}

// ---- backward: dQ ----------------------------------------------------------

struct alignas(64) QueryGradientScratch {
  Real q[QUERY_TILE / LANES][HEAD_QK][LANES];    // Q^T
  Real d_o[QUERY_TILE / LANES][HEAD_V][LANES];   // dO^T
  Real dq[QUERY_TILE / LANES][PITCH_QK][LANES];  // dQ^T
  Real offset[QUERY_TILE / LANES][LANES];
  Real delta[QUERY_TILE / LANES][LANES];
  Real k[KEY_TILE][PITCH_QK];
  Real v[KEY_TILE][PITCH_V];
  Real s[KEY_TILE][LANES];   // S^T, then P^T
  Real ds[KEY_TILE][LANES];  // dP^T, then dS^T
  Real row[PITCH_QK + PITCH_V];
  Lanes lanes[QUERY_TILE / LANES];
};

// Queries in lanes, keys n_first .. n_first + count - 1 streamed.
AFC_FN void differentiate_keys(QueryGradientScratch &t, int p, int n_first, int count, bool full,
                               const Item &item, const afc_args &args) {
  Real(*S)[LANES] = t.s, (*dP)[LANES] = t.ds;
  const int *m = t.lanes[p].row, *i = t.lanes[p].position;
  for (int r = 0; r < count; ++r) {
    const int n = n_first + r, j = int(n + args.k_origin);
    if (full) {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        differentiate(S[r][c], dP[r][c], t.offset[p][c], t.delta[p][c], true, m[c], n, i[c], j, item, args);
      }
    } else {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        const bool kept = keep(m[c], n, i[c], j, item, args);
        differentiate(S[r][c], dP[r][c], t.offset[p][c], t.delta[p][c], kept, m[c], n, i[c], j, item, args);
      }
    }
  }
}

// Scales, rounds once and stores one row of dQ.
AFC_FN void store_query_gradient(const afc_args &args, int64_t b, int64_t h,
                                 int64_t m, Real *row) {
  for (int d = 0; d < HEAD_QK; ++d) row[d] *= GRADIENT_SCALE;
  afc::store_row(afc::matrix<Element>(args.dq, b, h).row(m), row, HEAD_QK);
}

// One query tile of one head.
AFC_FN void query_gradient_tile(const afc_args &call, const Workspace &w, int64_t task,
                                QueryGradientScratch &t) {
  const int64_t tiles = afc::ceil_div(call.M, QUERY_TILE), head = task / tiles;
  const int64_t b = head / call.Hq, h = head % call.Hq, h_kv = h / (call.Hq / call.Hk);
  afc_args own;
  const afc_args &args = afc::args_of_batch(call, b, own);
  const int64_t first = (tiles - 1 - task % tiles) * QUERY_TILE;  // last rows first, as in forward
  const int rows = int(afc::min(int64_t(QUERY_TILE), args.M - first));
  const int panels = int(afc::ceil_div(rows, LANES));
  const Rows Q = afc::matrix<const Element>(args.q, b, h), dO = afc::matrix<const Element>(args.d_o, b, h);
  const Rows K = afc::matrix<const Element>(args.k, b, h_kv), V = afc::matrix<const Element>(args.v, b, h_kv);
  const afc::Matrix<const Real> lse = afc::matrix<const Real>(args.lse, b, h);
  const Item item = load_item(args, int(b), int(h));

  afc::load_panels(t.q[0][0], t.row, Q, first, rows, HEAD_QK);
  afc::load_panels(t.d_o[0][0], t.row, dO, first, rows, HEAD_V);
  std::memset(t.dq, 0, sizeof t.dq);
  for (int p = 0; p < panels; ++p) {
    set_lanes(t.lanes[p], first + p * LANES, args.M, args.q_origin);
    for (int c = 0; c < LANES; ++c) {
      const int64_t m = t.lanes[p].row[c];
      t.offset[p][c] = afc::weight_offset(*lse.row(m));
      t.delta[p][c] = w.delta[head * args.M + m];
    }
  }

  const Run run = afc::run_below(key_run(args, int(first), int(first + rows - 1)), afc::key_count(args, b));
  afc::walk(run, KEY_TILE, [&](int n_first, int count, bool full) {
    const bool finite = afc::load_tile(t.k[0], PITCH_QK, K, n_first, count, HEAD_QK);
    afc::load_tile(t.v[0], PITCH_V, V, n_first, count, HEAD_V);
    for (int p = 0; p < panels; ++p) {
      // ---- scores and weights: S^T = K Q^T, dP^T = V dO^T ----
      afc::multiply(t.s[0], t.k[0], PITCH_QK, t.q[p][0], count, HEAD_QK);
      afc::multiply(t.ds[0], t.v[0], PITCH_V, t.d_o[p][0], count, HEAD_V);
      differentiate_keys(t, p, n_first, count, full, item, args);
      afc::round_row<Element>(t.ds[0], count * LANES);
      // ---- dQ^T += K^T dS^T ----
      afc::accumulate_tile(t.dq[p][0], t.k[0], finite, PITCH_QK, t.ds[0], count, PITCH_QK);
    }
  });

  for (int r = 0; r < rows; ++r) {
    afc::gather_lane(t.row, t.dq[r / LANES][0], r % LANES, HEAD_QK);
    store_query_gradient(args, b, h, first + r, t.row);
  }
}

// ---- backward: dK and dV ---------------------------------------------------

struct alignas(64) KeyGradientScratch {
  Real k[LANE_KEY_TILE / LANES][HEAD_QK][LANES];    // K^T
  Real v[LANE_KEY_TILE / LANES][HEAD_V][LANES];     // V^T
  Real dk[LANE_KEY_TILE / LANES][PITCH_QK][LANES];  // dK^T, over the heads of the group
  Real dv[LANE_KEY_TILE / LANES][PITCH_V][LANES];   // dV^T
  Real q[STREAM_QUERY_TILE][PITCH_QK];
  Real d_o[STREAM_QUERY_TILE][PITCH_V];
  Real s[STREAM_QUERY_TILE][LANES];   // S, then P
  Real ds[STREAM_QUERY_TILE][LANES];  // dP, then dS
  Real offset[STREAM_QUERY_TILE];
  Real delta[STREAM_QUERY_TILE];
  Real row[PITCH_QK + PITCH_V];
  Lanes lanes[LANE_KEY_TILE / LANES];
};

// Keys in lanes, queries m_first .. m_first + count - 1 streamed.
AFC_FN void differentiate_queries(KeyGradientScratch &t, int p, int m_first, int count, bool full,
                                  const Item &item, const afc_args &args) {
  Real(*S)[LANES] = t.s, (*dP)[LANES] = t.ds;
  const int *n = t.lanes[p].row, *j = t.lanes[p].position;
  for (int r = 0; r < count; ++r) {
    const int m = m_first + r, i = int(m + args.q_origin);
    const Real offset = t.offset[r], delta = t.delta[r];
    if (full) {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        differentiate(S[r][c], dP[r][c], offset, delta, true, m, n[c], i, j[c], item, args);
      }
    } else {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        const bool kept = keep(m, n[c], i, j[c], item, args);
        differentiate(S[r][c], dP[r][c], offset, delta, kept, m, n[c], i, j[c], item, args);
      }
    }
  }
}

// What the query rows of head h add to dK and dV of a key tile.
AFC_FN void add_head(const afc_args &args, const Workspace &w, int64_t b, int64_t h, const Run &run,
                     int panels, KeyGradientScratch &t) {
  const Rows Q = afc::matrix<const Element>(args.q, b, h), dO = afc::matrix<const Element>(args.d_o, b, h);
  const afc::Matrix<const Real> lse = afc::matrix<const Real>(args.lse, b, h);
  const Real *delta = w.delta + (b * args.Hq + h) * args.M;
  const Item item = load_item(args, int(b), int(h));
  afc::walk(run, STREAM_QUERY_TILE, [&](int m_first, int count, bool full) {
    const bool finite_q = afc::load_tile(t.q[0], PITCH_QK, Q, m_first, count, HEAD_QK);
    const bool finite_d_o = afc::load_tile(t.d_o[0], PITCH_V, dO, m_first, count, HEAD_V);
    for (int r = 0; r < count; ++r) {
      t.offset[r] = afc::weight_offset(*lse.row(m_first + r));
      t.delta[r] = delta[m_first + r];
    }
    for (int p = 0; p < panels; ++p) {
      // ---- scores and weights: S = Q K^T, dP = dO V^T ----
      afc::multiply(t.s[0], t.q[0], PITCH_QK, t.k[p][0], count, HEAD_QK);
      afc::multiply(t.ds[0], t.d_o[0], PITCH_V, t.v[p][0], count, HEAD_V);
      differentiate_queries(t, p, m_first, count, full, item, args);
      afc::round_row<Element>(t.s[0], count * LANES);
      afc::round_row<Element>(t.ds[0], count * LANES);
      // ---- dV^T += dO^T P, dK^T += Q^T dS ----
      afc::accumulate_tile(t.dv[p][0], t.d_o[0], finite_d_o, PITCH_V, t.s[0], count, PITCH_V);
      afc::accumulate_tile(t.dk[p][0], t.q[0], finite_q, PITCH_QK, t.ds[0], count, PITCH_QK);
    }
  });
}

// Scales, rounds once and stores one row of dK.
AFC_FN void store_key_gradient(const afc_args &args, int64_t b, int64_t h,
                               int64_t n, Real *row) {
  for (int d = 0; d < HEAD_QK; ++d) row[d] *= GRADIENT_SCALE;
  afc::store_row(afc::matrix<Element>(args.dk, b, h).row(n), row, HEAD_QK);
}

// Rows first .. last - 1 of dK and dV are 0: those of keys that are not there.
AFC_FN void clear_key_gradients(const afc_args &args, int64_t b, int64_t h_kv, int64_t first, int64_t last) {
  const Real zeros[PITCH_QK + PITCH_V] = {};
  for (int64_t n = first; n < last; ++n) {
    afc::store_row(afc::matrix<Element>(args.dk, b, h_kv).row(n), zeros, HEAD_QK);
    afc::store_row(afc::matrix<Element>(args.dv, b, h_kv).row(n), zeros, HEAD_V);
  }
}

// One key tile of one key head: no other task touches its rows of dK and dV.
AFC_FN void key_gradient_tile(const afc_args &call, const Workspace &w, int64_t task, KeyGradientScratch &t) {
  const int64_t tiles = afc::ceil_div(call.N, LANE_KEY_TILE);
  const int64_t head = task / tiles, b = head / call.Hk, h_kv = head % call.Hk;
  afc_args own;
  const afc_args &args = afc::args_of_batch(call, b, own);
  const int64_t first = task % tiles * LANE_KEY_TILE, group = args.Hq / args.Hk;
  const int64_t keys = afc::key_count(args, b), last = afc::min(first + LANE_KEY_TILE, args.N);
  clear_key_gradients(args, b, h_kv, afc::max(first, keys), last);
  if (first >= keys) return;
  const int rows = int(afc::min(last, keys) - first);
  const int panels = int(afc::ceil_div(rows, LANES));
  const Rows K = afc::matrix<const Element>(args.k, b, h_kv), V = afc::matrix<const Element>(args.v, b, h_kv);

  afc::load_panels(t.k[0][0], t.row, K, first, rows, HEAD_QK);
  afc::load_panels(t.v[0][0], t.row, V, first, rows, HEAD_V);
  std::memset(t.dk, 0, sizeof t.dk);
  std::memset(t.dv, 0, sizeof t.dv);
  for (int p = 0; p < panels; ++p) set_lanes(t.lanes[p], first + p * LANES, keys, args.k_origin);

  const Run run = query_run(args, int(first), int(first + rows - 1));
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) add_head(args, w, b, h, run, panels, t);

  for (int r = 0; r < rows; ++r) {
    afc::gather_lane(t.row, t.dk[r / LANES][0], r % LANES, HEAD_QK);
    store_key_gradient(args, b, h_kv, first + r, t.row);
    afc::gather_lane(t.row, t.dv[r / LANES][0], r % LANES, HEAD_V);
    afc::store_row(afc::matrix<Element>(args.dv, b, h_kv).row(first + r), t.row, HEAD_V);
  }
}

union BackwardScratch {
  QueryGradientScratch dq;
  KeyGradientScratch dkv;
};

// ---- entry -----------------------------------------------------------------

Workspace lay_out(const afc_args &args, bool backward) {
  afc::Cursor cursor{args.workspace, 0};
  Workspace w{};
  if (backward) w.delta = cursor.take<Real>(args.B * args.Hq * args.M);
  w.scratch = cursor.take<ForwardScratch>(backward ? 0 : args.threads);
  if (backward) w.scratch = cursor.take<BackwardScratch>(args.threads);
  w.bytes = cursor.bytes;
  return w;
}

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {

// Bytes of workspace, -1 on failure. args->threads counts: each thread has its own scratch.
int64_t alibi_lm_cpu_float32_64_64_workspace(const afc_args *args, int backward) {
  if (afc::check_threads(*args) != AFC_OK) return -1;
  return lay_out(*args, backward != 0).bytes;
}

int alibi_lm_cpu_float32_64_64_forward(const afc_args *call) {
  afc_args args = *call;
  const Workspace w = lay_out(args, false);
  if (int status = afc::check_call(args, false, HEAD_QK, HEAD_V, CAPTURED, w.bytes)) return status;
  ForwardScratch *scratch = static_cast<ForwardScratch *>(w.scratch);
  const int64_t tasks = args.B * args.Hq * afc::ceil_div(args.M, QUERY_TILE);
  afc::parallel_for(args.threads, tasks,
                    [&](int64_t task, int thread) { forward_tile(args, task, scratch[thread]); });
  return AFC_OK;
}

int alibi_lm_cpu_float32_64_64_backward(const afc_args *call) {
  afc_args args = *call;
  const Workspace w = lay_out(args, true);
  if (int status = afc::check_call(args, true, HEAD_QK, HEAD_V, CAPTURED, w.bytes)) return status;
  BackwardScratch *scratch = static_cast<BackwardScratch *>(w.scratch);
  const int64_t heads = args.B * args.Hq, kv_heads = args.B * args.Hk;
  afc::parallel_for(args.threads, heads * afc::ceil_div(args.M, ROW_BLOCK),
                    [&](int64_t task, int) { delta_rows(args, task, w.delta); });
  afc::parallel_for(
      args.threads, heads * afc::ceil_div(args.M, QUERY_TILE),
      [&](int64_t task, int thread) { query_gradient_tile(args, w, task, scratch[thread].dq); });
  afc::parallel_for(
      args.threads, kv_heads * afc::ceil_div(args.N, LANE_KEY_TILE),
      [&](int64_t task, int thread) { key_gradient_tile(args, w, task, scratch[thread].dkv); });
  return AFC_OK;
}

}  // extern "C"
#pragma GCC visibility pop
