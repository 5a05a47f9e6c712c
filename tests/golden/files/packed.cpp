// ============================================================================
// afc: attention `packed` for target cpu
// source    packed.attn:2
// blocks    rope_position(pos = qpos, base = 10000.0) > rope_position(pos = kpos, base = 10000.0) on k > causal > document(qdoc = qdoc, kdoc = kdoc) > softmax
// tensors   q[B, H, M, 64], k[B, Hk, N, 64], v[B, Hk, N, 64], o[B, H, M, 64] float32
// options   qdoc[B, M] int, kdoc[B, N] int, qpos[B, M] int, kpos[B, N] int
// schedule  96 queries in lanes x 64 keys; dK, dV: 96 keys in lanes x 64 queries
// rebuild   afc compile packed.attn --emit cpp
// edit      templates/cpu, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "cpu/bounds.hpp"
#include "cpu/call.hpp"
#include "cpu/rotate.hpp"
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
constexpr int CAPTURED = 4;  // captured tensors
constexpr int Q_TABLE_WIDTH = 64;  // rotation coefficients of a position
constexpr int K_TABLE_WIDTH = 64;  // rotation coefficients of a position

// ---- building blocks -------------------------------------------------------

// Terms that depend on neither the query nor the key.
struct Item {
  int b;
};

AFC_FN Item load_item(const afc_args &args, int b, int h) {
  return Item{b};
}

// causal  [packed.attn:5]
// Keys at or before the query's own position.
AFC_FN bool causal(int i, int j) {
  return j <= i;
}

// document(qdoc = qdoc, kdoc = kdoc)  [packed.attn:5]
// Keys of the query's own document; a negative number is padding. Packed sequences, arXiv:2107.02027.
AFC_FN bool document(int m, int n, int b, const afc_args &args) {
  return afc::read<int64_t>(args.captured[0], b, m) == afc::read<int64_t>(args.captured[1], b, n) && afc::read<int64_t>(args.captured[1], b, n) >= 0;
}

AFC_FN bool keep(int m, int n, int i, int j, const Item &item, const afc_args &args) {
  return causal(i, j) && document(m, n, item.b, args);
}

// The mask on a box of queries m x keys n: may it keep an element, must it keep all?
AFC_FN afc::Truth keep_box(const afc_args &args, const afc::Table *tables, int b, int h, const afc::Ints &m,
                           const afc::Ints &n) {
  const afc::Ints i = m + args.q_origin;
  const afc::Ints j = n + args.k_origin;
  const auto read_0 = afc::bounds_at<int64_t>(tables[1], b, n);
  return j <= i
         && afc::bounds_at<int64_t>(tables[0], b, m) == read_0
         && read_0 >= 0;
}

// Keys that queries m_first..m_last see: runs of tiles of the given size, written to `memory`.
AFC_FN afc::RunList key_run(const afc_args &args, const afc::Table *tables, int b, int h, int m_first,
                              int m_last, int tile, Run *memory) {
  const afc::Ints m(m_first, m_last);
  return afc::runs_of(memory, tile, args.N, [&](int64_t first, int64_t end) {
    return keep_box(args, tables, b, h, m, afc::Ints(first, end - 1));
  });
}

// Queries that see keys n_first..n_last: runs of tiles of the given size, written to `memory`.
AFC_FN afc::RunList query_run(const afc_args &args, const afc::Table *tables, int b, int h, int n_first,
                                int n_last, int tile, Run *memory) {
  const afc::Ints n(n_first, n_last);
  return afc::runs_of(memory, tile, args.M, [&](int64_t first, int64_t end) {
    return keep_box(args, tables, b, h, afc::Ints(first, end - 1), n);
  });
}

// 10000.0 ** (0.015625 * (-2 * c))
static const double ROPE_POSITION_BY_PAIR[32] = {
    1.0, 0.7498942093324559, 0.5623413251903491, 0.4216965034285822,
    0.31622776601683794, 0.23713737056616552, 0.1778279410038923, 0.1333521432163324,
    0.1, 0.07498942093324558, 0.05623413251903491, 0.042169650342858224,
    0.03162277660168379, 0.023713737056616554, 0.01778279410038923, 0.01333521432163324,
    0.01, 0.007498942093324558, 0.005623413251903491, 0.004216965034285823,
    0.0031622776601683794, 0.0023713737056616554, 0.0017782794100389228, 0.001333521432163324,
    0.001, 0.0007498942093324559, 0.0005623413251903491, 0.00042169650342858224,
    0.00031622776601683794, 0.00023713737056616554, 0.00017782794100389227, 0.0001333521432163324};

// rope_position(pos = qpos, base = 10000.0)  [packed.attn:3]
// Coefficients of the rotation of q.
AFC_FN void rotate_q_coefficients_0(const afc_args &args, int b, int, int row, int, int pair, Real *c) {
  const double angle = double(afc::read<int64_t>(args.captured[2], b, row)) * ROPE_POSITION_BY_PAIR[pair];
  c[0] = Real(afc::cos(angle));
  c[1] = Real(afc::sin(angle));
}

// 10000.0 ** (0.015625 * (-2 * c))
static const double ROPE_POSITION_BY_PAIR_[32] = {
    1.0, 0.7498942093324559, 0.5623413251903491, 0.4216965034285822,
    0.31622776601683794, 0.23713737056616552, 0.1778279410038923, 0.1333521432163324,
    0.1, 0.07498942093324558, 0.05623413251903491, 0.042169650342858224,
    0.03162277660168379, 0.023713737056616554, 0.01778279410038923, 0.01333521432163324,
    0.01, 0.007498942093324558, 0.005623413251903491, 0.004216965034285823,
    0.0031622776601683794, 0.0023713737056616554, 0.0017782794100389228, 0.001333521432163324,
    0.001, 0.0007498942093324559, 0.0005623413251903491, 0.00042169650342858224,
    0.00031622776601683794, 0.00023713737056616554, 0.00017782794100389227, 0.0001333521432163324};

// rope_position(pos = kpos, base = 10000.0)  [packed.attn:4]
// Coefficients of the rotation of k.
AFC_FN void rotate_k_coefficients_0(const afc_args &args, int b, int, int row, int, int pair, Real *c) {
  const double angle = double(afc::read<int64_t>(args.captured[3], b, row)) * ROPE_POSITION_BY_PAIR_[pair];
  c[0] = Real(afc::cos(angle));
  c[1] = Real(afc::sin(angle));
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
  Element *q_rotated;
  Real *q_table;
  Element *k_rotated;
  Real *k_table;
  Real *delta;
  afc::Extent *extents_qdoc_1;
  afc::Extent *extents_kdoc_1;
  void *scratch;  // of all threads
  Run *runs;  // of all threads, most_runs(args) each
  afc::Table tables[2];  // qdoc, kdoc
  int64_t bytes;
};

// At most one run for each tile of the longer axis.
AFC_FN int64_t most_runs(const afc_args &args) {
  return afc::ceil_div(afc::max(args.M, args.N), 64);
}

// ---- rotations -------------------------------------------------------------

// Which table of coefficients serves which head of q.
AFC_FN afc::Tables q_tables(const afc_args &args) {
  return {args.B, args.Hq, true, false};
}

// The coefficients of row r of head h of q in batch b.
AFC_FN const Real *q_table_row(const afc_args &args, const Workspace &w, int64_t b, int64_t h, int64_t r) {
  return w.q_table + (q_tables(args).of(b, h) * args.M + r) * Q_TABLE_WIDTH;
}

// Rows first .. last - 1 of a table of q: for each rotation, coefficient k of all pairs before coefficient k + 1.
// Positions vary fastest, so that what depends on the pair alone is computed once for all of them.
AFC_FN void tabulate_q(const afc_args &args, const Workspace &w, int64_t table, int64_t first, int64_t last) {
  const int64_t b = q_tables(args).batch(table), h = q_tables(args).head(table);
  const int64_t origin = args.q_origin_per_batch != nullptr ? args.q_origin_per_batch[b] : args.q_origin;
  for (int pair = 0; pair < 32; ++pair) {
    for (int64_t r = first; r < last; ++r) {
      Real c[2];
      rotate_q_coefficients_0(args, int(b), int(h), int(r), int(r + origin), pair, c);
      Real *to = w.q_table + (table * args.M + r) * Q_TABLE_WIDTH + 0 + pair;
      for (int k = 0; k < 2; ++k) to[k * 32] = c[k];
    }
  }
}

// Rotates one row of q in place.
AFC_FN void rotate_q(Real *row, const Real *table) {
  // rope_position(pos = qpos, base = 10000.0)
#pragma omp simd
  for (int pair = 0; pair < 32; ++pair) {
    Real c[2];
    const Real *from = table + 0 + pair;
    for (int k = 0; k < 2; ++k) c[k] = from[k * 32];
    const Real x0 = row[0 + pair];
    const Real x1 = row[0 + 32 + pair];
    row[0 + pair] = std::fma(x0, c[0], x1 * (-c[1]));
    row[0 + 32 + pair] = std::fma(x0, c[1], x1 * (c[0]));
  }
}

// Applies the transposed rotations to one row of the gradient of q, last rotation first.
AFC_FN void rotate_q_transposed(Real *row, const Real *table) {
  // rope_position(pos = qpos, base = 10000.0)
#pragma omp simd
  for (int pair = 0; pair < 32; ++pair) {
    Real c[2];
    const Real *from = table + 0 + pair;
    for (int k = 0; k < 2; ++k) c[k] = from[k * 32];
    const Real x0 = row[0 + pair];
    const Real x1 = row[0 + 32 + pair];
    row[0 + pair] = std::fma(x0, c[0], x1 * (c[1]));
    row[0 + 32 + pair] = std::fma(x0, -c[1], x1 * (c[0]));
  }
}

// Which table of coefficients serves which head of k.
AFC_FN afc::Tables k_tables(const afc_args &args) {
  return {args.B, args.Hk, true, false};
}

// The coefficients of row r of head h of k in batch b.
AFC_FN const Real *k_table_row(const afc_args &args, const Workspace &w, int64_t b, int64_t h, int64_t r) {
  return w.k_table + (k_tables(args).of(b, h) * args.N + r) * K_TABLE_WIDTH;
}

// Rows first .. last - 1 of a table of k: for each rotation, coefficient k of all pairs before coefficient k + 1.
// Positions vary fastest, so that what depends on the pair alone is computed once for all of them.
AFC_FN void tabulate_k(const afc_args &args, const Workspace &w, int64_t table, int64_t first, int64_t last) {
  const int64_t b = k_tables(args).batch(table), h = k_tables(args).head(table);
  const int64_t origin = args.k_origin_per_batch != nullptr ? args.k_origin_per_batch[b] : args.k_origin;
  for (int pair = 0; pair < 32; ++pair) {
    for (int64_t r = first; r < last; ++r) {
      Real c[2];
      rotate_k_coefficients_0(args, int(b), int(h), int(r), int(r + origin), pair, c);
      Real *to = w.k_table + (table * args.N + r) * K_TABLE_WIDTH + 0 + pair;
      for (int k = 0; k < 2; ++k) to[k * 32] = c[k];
    }
  }
}

// Rotates one row of k in place.
AFC_FN void rotate_k(Real *row, const Real *table) {
  // rope_position(pos = kpos, base = 10000.0)
#pragma omp simd
  for (int pair = 0; pair < 32; ++pair) {
    Real c[2];
    const Real *from = table + 0 + pair;
    for (int k = 0; k < 2; ++k) c[k] = from[k * 32];
    const Real x0 = row[0 + pair];
    const Real x1 = row[0 + 32 + pair];
    row[0 + pair] = std::fma(x0, c[0], x1 * (-c[1]));
    row[0 + 32 + pair] = std::fma(x0, c[1], x1 * (c[0]));
  }
}

// Applies the transposed rotations to one row of the gradient of k, last rotation first.
AFC_FN void rotate_k_transposed(Real *row, const Real *table) {
  // rope_position(pos = kpos, base = 10000.0)
#pragma omp simd
  for (int pair = 0; pair < 32; ++pair) {
    Real c[2];
    const Real *from = table + 0 + pair;
    for (int k = 0; k < 2; ++k) c[k] = from[k * 32];
    const Real x0 = row[0 + pair];
    const Real x1 = row[0 + 32 + pair];
    row[0 + pair] = std::fma(x0, c[0], x1 * (c[1]));
    row[0 + 32 + pair] = std::fma(x0, -c[1], x1 * (c[0]));
  }
}

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
      continue;
    }
#pragma omp simd
    for (int c = 0; c < LANES; ++c) {
      const int m = lanes.row[c], i = lanes.position[c];
      const bool kept = keep(m, n, i, j, item, args);
      S[r][c] = kept ? S[r][c] : afc::minus_infinity<Real>();
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
AFC_FN void forward_tile(const afc_args &call, const Workspace &w, int64_t task, Run *memory, ForwardScratch &t) {
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

  const afc::RunList run = afc::run_below(key_run(args, w.tables, int(b), int(h), int(first), int(first + rows - 1), KEY_TILE, memory), afc::key_count(args, b));
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
AFC_FN void differentiate(Real &S, Real &dP, Real offset, Real delta, bool kept) {
  const Real s = S;
  const Real x = !kept ? afc::minus_infinity<Real>() : s;
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
        differentiate(S[r][c], dP[r][c], t.offset[p][c], t.delta[p][c], true);
      }
    } else {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        const bool kept = keep(m[c], n, i[c], j, item, args);
        differentiate(S[r][c], dP[r][c], t.offset[p][c], t.delta[p][c], kept);
      }
    }
  }
}

// Scales, rotates back, rounds once and stores one row of dQ.
AFC_FN void store_query_gradient(const afc_args &args, const Workspace &w, int64_t b, int64_t h,
                                 int64_t m, Real *row) {
  for (int d = 0; d < HEAD_QK; ++d) row[d] *= GRADIENT_SCALE;
  rotate_q_transposed(row, q_table_row(args, w, b, h, m));
  afc::store_row(afc::matrix<Element>(args.dq, b, h).row(m), row, HEAD_QK);
}

// One query tile of one head.
AFC_FN void query_gradient_tile(const afc_args &call, const Workspace &w, int64_t task,
                                Run *memory, QueryGradientScratch &t) {
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

  const afc::RunList run = afc::run_below(key_run(args, w.tables, int(b), int(h), int(first), int(first + rows - 1), KEY_TILE, memory), afc::key_count(args, b));
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
    store_query_gradient(args, w, b, h, first + r, t.row);
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
        differentiate(S[r][c], dP[r][c], offset, delta, true);
      }
    } else {
      #pragma omp simd
      for (int c = 0; c < LANES; ++c) {
        const bool kept = keep(m, n[c], i, j[c], item, args);
        differentiate(S[r][c], dP[r][c], offset, delta, kept);
      }
    }
  }
}

// What the query rows of head h add to dK and dV of a key tile.
AFC_FN void add_head(const afc_args &args, const Workspace &w, int64_t b, int64_t h, const afc::RunList &run,
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

// Scales, rotates back, rounds once and stores one row of dK.
AFC_FN void store_key_gradient(const afc_args &args, const Workspace &w, int64_t b, int64_t h,
                               int64_t n, Real *row) {
  for (int d = 0; d < HEAD_QK; ++d) row[d] *= GRADIENT_SCALE;
  rotate_k_transposed(row, k_table_row(args, w, b, h, n));
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
AFC_FN void key_gradient_tile(const afc_args &call, const Workspace &w, int64_t task, Run *memory, KeyGradientScratch &t) {
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

  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const afc::RunList run = query_run(args, w.tables, int(b), int(h), int(first), int(first + rows - 1), STREAM_QUERY_TILE, memory);
    add_head(args, w, b, h, run, panels, t);
  }

  for (int r = 0; r < rows; ++r) {
    afc::gather_lane(t.row, t.dk[r / LANES][0], r % LANES, HEAD_QK);
    store_key_gradient(args, w, b, h_kv, first + r, t.row);
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
  w.q_rotated = cursor.take<Element>(args.B * args.Hq * args.M * 64);
  w.q_table = cursor.take<Real>(q_tables(args).count() * args.M * Q_TABLE_WIDTH);
  w.k_rotated = cursor.take<Element>(args.B * args.Hk * args.N * 64);
  w.k_table = cursor.take<Real>(k_tables(args).count() * args.N * K_TABLE_WIDTH);
  if (backward) w.delta = cursor.take<Real>(args.B * args.Hq * args.M);
  w.extents_qdoc_1 = cursor.take<afc::Extent>(args.B * (12 * ((args.M + 31) / 32)));
  w.extents_kdoc_1 = cursor.take<afc::Extent>(args.B * (12 * ((args.N + 31) / 32)));
  w.scratch = cursor.take<ForwardScratch>(backward ? 0 : args.threads);
  if (backward) w.scratch = cursor.take<BackwardScratch>(args.threads);
  w.runs = cursor.take<Run>(args.threads * most_runs(args));
  w.bytes = cursor.bytes;
  return w;
}

// What the mask reads, with the extents of ranges.
void tabulate_mask(const afc_args &args, Workspace &w) {
  w.tables[0] = {&args.captured[0], 1, nullptr};
  afc::tabulate<int64_t>(args.threads, w.tables[0], w.extents_qdoc_1, args.B * (12 * ((args.M + 31) / 32)));
  w.tables[1] = {&args.captured[1], 1, nullptr};
  afc::tabulate<int64_t>(args.threads, w.tables[1], w.extents_kdoc_1, args.B * (12 * ((args.N + 31) / 32)));
}

// Replaces q and k by rotated copies.
void rotate(afc_args &args, const Workspace &w) {
  afc::rotate_operand<HEAD_QK>(
      args.threads, q_tables(args), args.M, args.q, w.q_rotated, w.q_table, Q_TABLE_WIDTH,
      [&](int64_t) { return args.M; },
      [&](int64_t table, int64_t first, int64_t last) { tabulate_q(args, w, table, first, last); },
      [](int64_t, int64_t, int64_t, Real *row, const Real *coefficients) { rotate_q(row, coefficients); });
  afc::rotate_operand<HEAD_QK>(
      args.threads, k_tables(args), args.N, args.k, w.k_rotated, w.k_table, K_TABLE_WIDTH,
      [&](int64_t b) { return afc::key_count(args, b); },
      [&](int64_t table, int64_t first, int64_t last) { tabulate_k(args, w, table, first, last); },
      [](int64_t, int64_t, int64_t, Real *row, const Real *coefficients) { rotate_k(row, coefficients); });
}

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {

// Bytes of workspace, -1 on failure. args->threads counts: each thread has its own scratch.
int64_t packed_cpu_float32_64_64_workspace(const afc_args *args, int backward) {
  if (afc::check_threads(*args) != AFC_OK) return -1;
  return lay_out(*args, backward != 0).bytes;
}

int packed_cpu_float32_64_64_forward(const afc_args *call) {
  afc_args args = *call;
  Workspace w = lay_out(args, false);
  if (int status = afc::check_call(args, false, HEAD_QK, HEAD_V, CAPTURED, w.bytes)) return status;
  rotate(args, w);
  tabulate_mask(args, w);
  ForwardScratch *scratch = static_cast<ForwardScratch *>(w.scratch);
  const int64_t tasks = args.B * args.Hq * afc::ceil_div(args.M, QUERY_TILE), most = most_runs(args);
  afc::parallel_for(args.threads, tasks, [&](int64_t task, int thread) {
    forward_tile(args, w, task, w.runs + thread * most, scratch[thread]);
  });
  return AFC_OK;
}

int packed_cpu_float32_64_64_backward(const afc_args *call) {
  afc_args args = *call;
  Workspace w = lay_out(args, true);
  if (int status = afc::check_call(args, true, HEAD_QK, HEAD_V, CAPTURED, w.bytes)) return status;
  rotate(args, w);
  tabulate_mask(args, w);
  BackwardScratch *scratch = static_cast<BackwardScratch *>(w.scratch);
  const int64_t heads = args.B * args.Hq, kv_heads = args.B * args.Hk;
  const int64_t most = most_runs(args);
  afc::parallel_for(args.threads, heads * afc::ceil_div(args.M, ROW_BLOCK),
                    [&](int64_t task, int) { delta_rows(args, task, w.delta); });
  afc::parallel_for(
      args.threads, heads * afc::ceil_div(args.M, QUERY_TILE),
      [&](int64_t task, int thread) { query_gradient_tile(args, w, task, w.runs + thread * most, scratch[thread].dq); });
  afc::parallel_for(
      args.threads, kv_heads * afc::ceil_div(args.N, LANE_KEY_TILE),
      [&](int64_t task, int thread) { key_gradient_tile(args, w, task, w.runs + thread * most, scratch[thread].dkv); });
  return AFC_OK;
}

}  // extern "C"
#pragma GCC visibility pop
