// ============================================================================
// afc: attention `packed` for target sm86, GPUs with at least 99 KB of shared memory a block
// source    packed.attn:2
// blocks    rope_position(pos = qpos, base = 10000.0) > rope_position(pos = kpos, base = 10000.0) on k > causal > document(qdoc = qdoc, kdoc = kdoc) > softmax
// tensors   q[B, H, M, 128], k[B, Hk, N, 128], v[B, Hk, N, 128], o[B, H, M, 128] bfloat16
// options   qdoc[B, M] int, kdoc[B, N] int, qpos[B, M] int, kpos[B, N] int
// schedule  forward 128 x 64, 8 warps; backward 32 x 128, 8 warps (queries x keys)
// rebuild   afc compile packed.attn --emit cu
// edit      templates/sm80, grammar/prelude
// ============================================================================
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"
#include "tile/walk.cuh"
#include "tile/rotation.cuh"
#include "tile/gradient_sum.cuh"
#include "tile/functions.cuh"
#include "tile/mask_plan.cuh"

using Element = tile::Bf16;  // storage type of q, k, v, o and of the gradients

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Terms that depend on neither the query nor the key.
struct Item {
  int b;
};

AFC_FN Item load_item(const afc_args &args, int b, int h) {
  return Item{b};
}

// What scores and mask read of captured tensors for a query.
struct Row {
  int64_t qdoc_b_m;
};

AFC_FN Row load_row(int m, int i, const Item &item, const afc_args &args) {
  return Row{afc::read<int64_t>(args.captured[0], item.b, m)};
}

// What scores and mask read of captured tensors for a key.
struct Column {
  int64_t kdoc_b_n;
};

AFC_FN Column load_column(int n, int j, const Item &item, const afc_args &args) {
  return Column{afc::read<int64_t>(args.captured[1], item.b, n)};
}

// causal  [packed.attn:5]
// Keys at or before the query's own position.
AFC_FN bool causal(int i, int j) {
  return j <= i;
}

// document(qdoc = qdoc, kdoc = kdoc)  [packed.attn:5]
// Keys of the query's own document; a negative number is padding. Packed sequences, arXiv:2107.02027.
AFC_FN bool document(int64_t qdoc_b_m, int64_t kdoc_b_n) {
  return qdoc_b_m == kdoc_b_n && kdoc_b_n >= 0;
}

AFC_FN bool keep(int m, int n, int i, int j, const Row &row, const Column &column, const Item &item, const afc_args &args) {
  return causal(i, j) && document(row.qdoc_b_m, column.kdoc_b_n);
}

// The mask on a box of queries m x keys n: may it keep an element, must it keep all?
AFC_FN afc::Truth keep_box(const afc_args &args, const afc::Table *tables, const tile::Places &places, int b, int h, const afc::Ints &m,
                           const afc::Ints &n) {
  const afc::Ints i = m + places.q_origin;
  const afc::Ints j = n + places.k_origin;
  const auto read_0 = afc::bounds_at<int64_t, 1>(tables[1], b, n);
  return j <= i
         && afc::bounds_at<int64_t, 1>(tables[0], b, m) == read_0
         && read_0 >= 0;
}

// 10000.0 ** (0.0078125 * (-2 * c))
static __device__ const double ROPE_POSITION_BY_PAIR[64] = {
    1.0, 0.8659643233600653, 0.7498942093324559, 0.6493816315762113,
    0.5623413251903491, 0.4869675251658631, 0.4216965034285822, 0.3651741272548377,
    0.31622776601683794, 0.27384196342643613, 0.23713737056616552, 0.2053525026457146,
    0.1778279410038923, 0.1539926526059492, 0.1333521432163324, 0.11547819846894582,
    0.1, 0.08659643233600653, 0.07498942093324558, 0.06493816315762113,
    0.05623413251903491, 0.04869675251658631, 0.042169650342858224, 0.03651741272548377,
    0.03162277660168379, 0.027384196342643614, 0.023713737056616554, 0.02053525026457146,
    0.01778279410038923, 0.01539926526059492, 0.01333521432163324, 0.011547819846894581,
    0.01, 0.008659643233600654, 0.007498942093324558, 0.006493816315762113,
    0.005623413251903491, 0.004869675251658631, 0.004216965034285823, 0.003651741272548377,
    0.0031622776601683794, 0.0027384196342643613, 0.0023713737056616554, 0.002053525026457146,
    0.0017782794100389228, 0.001539926526059492, 0.001333521432163324, 0.0011547819846894581,
    0.001, 0.0008659643233600654, 0.0007498942093324559, 0.0006493816315762113,
    0.0005623413251903491, 0.0004869675251658631, 0.00042169650342858224, 0.0003651741272548377,
    0.00031622776601683794, 0.0002738419634264361, 0.00023713737056616554, 0.0002053525026457146,
    0.00017782794100389227, 0.0001539926526059492, 0.0001333521432163324, 0.00011547819846894582};

// rope_position(pos = qpos, base = 10000.0)  [packed.attn:3]
// Coefficients of the rotation of q.
AFC_FN void rotate_q_coefficients_0(const afc_args &args, int b, int, int row, int, int pair, Real *c) {
  const double angle = double(afc::read<int64_t>(args.captured[2], b, row)) * ROPE_POSITION_BY_PAIR[pair];
  c[0] = Real(afc::cos(angle));
  c[1] = Real(afc::sin(angle));
}

// 10000.0 ** (0.0078125 * (-2 * c))
static __device__ const double ROPE_POSITION_BY_PAIR_[64] = {
    1.0, 0.8659643233600653, 0.7498942093324559, 0.6493816315762113,
    0.5623413251903491, 0.4869675251658631, 0.4216965034285822, 0.3651741272548377,
    0.31622776601683794, 0.27384196342643613, 0.23713737056616552, 0.2053525026457146,
    0.1778279410038923, 0.1539926526059492, 0.1333521432163324, 0.11547819846894582,
    0.1, 0.08659643233600653, 0.07498942093324558, 0.06493816315762113,
    0.05623413251903491, 0.04869675251658631, 0.042169650342858224, 0.03651741272548377,
    0.03162277660168379, 0.027384196342643614, 0.023713737056616554, 0.02053525026457146,
    0.01778279410038923, 0.01539926526059492, 0.01333521432163324, 0.011547819846894581,
    0.01, 0.008659643233600654, 0.007498942093324558, 0.006493816315762113,
    0.005623413251903491, 0.004869675251658631, 0.004216965034285823, 0.003651741272548377,
    0.0031622776601683794, 0.0027384196342643613, 0.0023713737056616554, 0.002053525026457146,
    0.0017782794100389228, 0.001539926526059492, 0.001333521432163324, 0.0011547819846894581,
    0.001, 0.0008659643233600654, 0.0007498942093324559, 0.0006493816315762113,
    0.0005623413251903491, 0.0004869675251658631, 0.00042169650342858224, 0.0003651741272548377,
    0.00031622776601683794, 0.0002738419634264361, 0.00023713737056616554, 0.0002053525026457146,
    0.00017782794100389227, 0.0001539926526059492, 0.0001333521432163324, 0.00011547819846894582};

// rope_position(pos = kpos, base = 10000.0)  [packed.attn:4]
// Coefficients of the rotation of k.
AFC_FN void rotate_k_coefficients_0(const afc_args &args, int b, int, int row, int, int pair, Real *c) {
  const double angle = double(afc::read<int64_t>(args.captured[3], b, row)) * ROPE_POSITION_BY_PAIR_[pair];
  c[0] = Real(afc::cos(angle));
  c[1] = Real(afc::sin(angle));
}

// Columns 0..127, half-split pairs.
struct QRotation0 {
  static constexpr int FIRST = 0, PAIRS = 64, COEFFICIENTS = 2;
  static constexpr bool ADJACENT = false;
  static constexpr int STRIDE = 128;  // floats from one table row to the next

  AFC_FN static float a00(const float *c) { return c[0]; }
  AFC_FN static float a01(const float *c) { return -c[1]; }
  AFC_FN static float a10(const float *c) { return c[1]; }
  AFC_FN static float a11(const float *c) { return c[0]; }

  AFC_FN static void coefficients(const afc_args &args, int b, int h, int row, int position, int pair, float *c) {
    rotate_q_coefficients_0(args, b, h, row, position, pair, c);
  }

  AFC_FN static tile::Tables tables(const afc_args &args) {
    return {static_cast<int>(args.B), static_cast<int>(args.Hq), true, false};
  }

  AFC_FN static float *table(const afc_args &args, int b, int h, int64_t row) {
    const int64_t rows = tables(args).of(b, h) * args.M + row;
    return static_cast<float *>(args.buffer[1]) + rows * STRIDE + 0;
  }
};

// Columns 0..127, half-split pairs.
struct KRotation0 {
  static constexpr int FIRST = 0, PAIRS = 64, COEFFICIENTS = 2;
  static constexpr bool ADJACENT = false;
  static constexpr int STRIDE = 128;  // floats from one table row to the next

  AFC_FN static float a00(const float *c) { return c[0]; }
  AFC_FN static float a01(const float *c) { return -c[1]; }
  AFC_FN static float a10(const float *c) { return c[1]; }
  AFC_FN static float a11(const float *c) { return c[0]; }

  AFC_FN static void coefficients(const afc_args &args, int b, int h, int row, int position, int pair, float *c) {
    rotate_k_coefficients_0(args, b, h, row, position, pair, c);
  }

  AFC_FN static tile::Tables tables(const afc_args &args) {
    return {static_cast<int>(args.B), static_cast<int>(args.Hk), true, false};
  }

  AFC_FN static float *table(const afc_args &args, int b, int h, int64_t row) {
    const int64_t rows = tables(args).of(b, h) * args.N + row;
    return static_cast<float *>(args.buffer[3]) + rows * STRIDE + 0;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// packed_extents: least and largest values of what the mask reads of captured tensors
//
// A CTA tabulates one chunk of 8192 elements; the x index counts those of one tensor after the other.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(512) packed_extents(const __grid_constant__ afc_args args) {
  constexpr int THREADS = 512;
  afc::Extent *extents = static_cast<afc::Extent *>(args.buffer[6]);
  int64_t chunk = blockIdx.x;

  {  // qdoc
    const int64_t chunks = args.B * ((args.M + 8191) / 8192);
    if (chunk < chunks) {
      afc::tabulate_chunk<int64_t, 2, 1, THREADS>(args.captured[0], extents, chunk, chunks);
      return;
    }
    chunk -= chunks;
    extents += chunks * afc::CHUNK_EXTENTS;
  }

  {  // kdoc
    const int64_t chunks = args.B * ((args.N + 8191) / 8192);
    if (chunk < chunks) {
      afc::tabulate_chunk<int64_t, 2, 1, THREADS>(args.captured[1], extents, chunk, chunks);
      return;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_plan_keys_of_128_by_64: the tiles of 64 keys that each tile of 128 queries visits, by the three-valued test of the mask
//
// A warp finds the runs of one tile of one batch entry.
// The bound of one CTA keeps ptxas from spilling for the sake of more.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1) packed_plan_keys_of_128_by_64(const __grid_constant__ afc_args args) {
  constexpr int OWN_TILE = 128, OTHER_TILE = 64, WARPS = 4;
  const int tiles = tile::ceil_div(static_cast<int>(args.M), OWN_TILE);
  const int work = blockIdx.x * WARPS + tile::warp_index(threadIdx.x), batch_head = work / tiles;
  const int b = batch_head, h = 0;
  if (b >= static_cast<int>(args.B)) return;
  const tile::Places places = tile::places_of(args, b);
  const afc::Extent *extents = static_cast<const afc::Extent *>(args.buffer[6]);
  const afc::Table tables[] = {
      afc::table_of<2, 1>(args.captured[0], extents + (0) * afc::CHUNK_EXTENTS, args.B * ((args.M + 8191) / 8192)),  // qdoc
      afc::table_of<2, 1>(args.captured[1], extents + (args.B * ((args.M + 8191) / 8192)) * afc::CHUNK_EXTENTS, args.B * ((args.N + 8191) / 8192)),  // kdoc
  };
  const int length = static_cast<int>(args.M);
  const int first = (work - batch_head * tiles) * OWN_TILE, last = min(first + OWN_TILE, length) - 1;
  const afc::Ints m(first, last);
  tile::RunWriter runs(static_cast<int4 *>(args.buffer[7]) + static_cast<int64_t>(work) * tile::RUN_ROW);
  const auto test = [&](int begin, int end) {
    const afc::Ints n(begin, end);
    return keep_box(args, tables, places, b, h, m, n);
  };
  tile::find_runs(runs, test, places.keys, OTHER_TILE, true);
  runs.finish();
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_plan_queries_of_128_by_32: the tiles of 32 queries that each tile of 128 keys visits, by the three-valued test of the mask
//
// A warp finds the runs of one tile of one batch entry.
// The bound of one CTA keeps ptxas from spilling for the sake of more.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1) packed_plan_queries_of_128_by_32(const __grid_constant__ afc_args args) {
  constexpr int OWN_TILE = 128, OTHER_TILE = 32, WARPS = 4;
  const int tiles = tile::ceil_div(static_cast<int>(args.N), OWN_TILE);
  const int work = blockIdx.x * WARPS + tile::warp_index(threadIdx.x), batch_head = work / tiles;
  const int b = batch_head, h = 0;
  if (b >= static_cast<int>(args.B)) return;
  const tile::Places places = tile::places_of(args, b);
  const afc::Extent *extents = static_cast<const afc::Extent *>(args.buffer[6]);
  const afc::Table tables[] = {
      afc::table_of<2, 1>(args.captured[0], extents + (0) * afc::CHUNK_EXTENTS, args.B * ((args.M + 8191) / 8192)),  // qdoc
      afc::table_of<2, 1>(args.captured[1], extents + (args.B * ((args.M + 8191) / 8192)) * afc::CHUNK_EXTENTS, args.B * ((args.N + 8191) / 8192)),  // kdoc
  };
  const int length = places.keys;
  const int first = (work - batch_head * tiles) * OWN_TILE, last = min(first + OWN_TILE, length) - 1;
  const afc::Ints n(first, last);
  tile::RunWriter runs(static_cast<int4 *>(args.buffer[8]) + static_cast<int64_t>(work) * tile::RUN_ROW);
  const auto test = [&](int begin, int end) {
    const afc::Ints m(begin, end);
    return keep_box(args, tables, places, b, h, m, n);
  };
  // In a ragged key tile nothing is full: a zero row of K has a weight that may overflow.
  const int queries = first <= last ? static_cast<int>(args.M) : 0;
  tile::find_runs(runs, test, queries, OTHER_TILE, last == first + OWN_TILE - 1);
  runs.finish();
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_plan_keys_of_64_by_32: the tiles of 32 keys that each tile of 64 queries visits, by the three-valued test of the mask
//
// A warp finds the runs of one tile of one batch entry.
// The bound of one CTA keeps ptxas from spilling for the sake of more.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1) packed_plan_keys_of_64_by_32(const __grid_constant__ afc_args args) {
  constexpr int OWN_TILE = 64, OTHER_TILE = 32, WARPS = 4;
  const int tiles = tile::ceil_div(static_cast<int>(args.M), OWN_TILE);
  const int work = blockIdx.x * WARPS + tile::warp_index(threadIdx.x), batch_head = work / tiles;
  const int b = batch_head, h = 0;
  if (b >= static_cast<int>(args.B)) return;
  const tile::Places places = tile::places_of(args, b);
  const afc::Extent *extents = static_cast<const afc::Extent *>(args.buffer[6]);
  const afc::Table tables[] = {
      afc::table_of<2, 1>(args.captured[0], extents + (0) * afc::CHUNK_EXTENTS, args.B * ((args.M + 8191) / 8192)),  // qdoc
      afc::table_of<2, 1>(args.captured[1], extents + (args.B * ((args.M + 8191) / 8192)) * afc::CHUNK_EXTENTS, args.B * ((args.N + 8191) / 8192)),  // kdoc
  };
  const int length = static_cast<int>(args.M);
  const int first = (work - batch_head * tiles) * OWN_TILE, last = min(first + OWN_TILE, length) - 1;
  const afc::Ints m(first, last);
  tile::RunWriter runs(static_cast<int4 *>(args.buffer[9]) + static_cast<int64_t>(work) * tile::RUN_ROW);
  const auto test = [&](int begin, int end) {
    const afc::Ints n(begin, end);
    return keep_box(args, tables, places, b, h, m, n);
  };
  tile::find_runs(runs, test, places.keys, OTHER_TILE, true);
  runs.finish();
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_rotate_forward: rotation tables and rotated rows, once for all that reads them
//
// The x index of a CTA is a block of 16 rows of q, then of k; its y index is a share of the (batch, head)s.
// Coefficients are computed in double precision, by each CTA once for all (batch, head)s of its share that have them.
// Two CTAs on an SM have enough rows on their way; a bound of more makes ptxas spill.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256, 2) packed_rotate_forward(const __grid_constant__ afc_args args) {
  constexpr int THREADS = 256, TILE_ROWS = 16;
  int block = blockIdx.x;

  {
    const int rows = static_cast<int>(args.M), first_row = block * TILE_ROWS;
    const int valid_rows = min(TILE_ROWS, rows - first_row);
    const tile::Tables tables = QRotation0::tables(args);
    for (int table = blockIdx.y; table < tables.count(); table += gridDim.y) {
      const int b = tables.batch(table), h = tables.head(table);
      const int origin = static_cast<int>(
          tile::origin_of(args.q_origin_per_batch, args.q_origin, b, args.M));
      {
        using R = QRotation0;
        __shared__ __align__(16) float coefficients[TILE_ROWS * R::PAIRS * R::COEFFICIENTS];
        __syncthreads();  // nobody reads those of the table before any more
        tile::compute_coefficients<R, THREADS>(coefficients, args, b, h, origin, first_row, valid_rows,
                                               true);
      }
    }
    block -= tile::ceil_div(rows, TILE_ROWS);
    if (block < 0) return;
  }

  {
    const int rows = static_cast<int>(args.N), first_row = block * TILE_ROWS;
    const int valid_rows = tile::keys_in_use(args, first_row) ? min(TILE_ROWS, rows - first_row) : 0;
    const tile::Tables tables = KRotation0::tables(args);
    const afc_tensor rotated = tile::contiguous(args.buffer[2], tables.heads, rows, 128);
    // One table after the other; its (batch, head)s are divided into parts.
    const int shares = min(tables.batches * tables.heads, static_cast<int>(gridDim.y));
    const int parts = max(1, shares / max(tables.count(), 1));
    for (int share = blockIdx.y; share < tables.count() * parts; share += gridDim.y) {
      const int table = share / parts, part = share % parts;
      const tile::Members members = tables.members(table, part, parts);
      const int b = tables.batch(table), h = tables.head(table);
      const int origin = static_cast<int>(
          tile::origin_of(args.k_origin_per_batch, args.k_origin, b, args.N));
      {
        using R = KRotation0;
        __shared__ __align__(16) float coefficients[TILE_ROWS * R::PAIRS * R::COEFFICIENTS];
        __syncthreads();  // nobody reads those of the table before any more
        tile::compute_coefficients<R, THREADS>(coefficients, args, b, h, origin, first_row, valid_rows,
                                               false);
        tile::rotate_rows<Element, R, THREADS, TILE_ROWS>(args.k, rotated, coefficients, first_row, valid_rows, tables.heads, members,
                                               args.kv_len_per_batch);
      }
    }
    block -= tile::ceil_div(rows, TILE_ROWS);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_forward: O = softmax(score(Q K^T)) V and its log-sum-exp
//
// A CTA computes 128 query rows of one (batch, head) with 8 warps; scores, weights and outputs of a warp's
// rows stay in its registers. K and V pass through two stages of shared memory, 64 keys at a time.
// ---------------------------------------------------------------------------------------------------------------------
namespace packed_forward_parts {

constexpr int D_QK = 128, D_V = 128;
constexpr int TILE_M = 128, TILE_N = 64, WARPS = 8, THREADS = WARPS * 32;
constexpr int ROW_BLOCKS = TILE_M / WARPS / 16;        // 16-row blocks of a warp
constexpr int KEY_OCTETS = TILE_N / 8, V_OCTETS = D_V / 8;
constexpr int SECTION = 8;                          // heads worked on at a time
constexpr float SOFTMAX_SCALE = 0.08838834764831845f;
constexpr float SCALE_LOG2 = 0.12751743082459868f;  // SOFTMAX_SCALE log2(e)

using TileQ = tile::SharedTile<TILE_M, D_QK>;
using TileK = tile::SharedTile<TILE_N, D_QK>;
using TileV = tile::SharedTile<TILE_N, D_V>;
using TileO = tile::SharedTile<TILE_M, D_V>;

// Shared memory: Q | K, V of stage 0 | K, V of stage 1; at the end O over all of it.
constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES;
constexpr int INPUT_BYTES = TileQ::BYTES + 2 * STAGE_BYTES;
constexpr int SHARED_BYTES = INPUT_BYTES > TileO::BYTES ? INPUT_BYTES : TileO::BYTES;
static_assert(SHARED_BYTES == 98304, "the launch plan and the kernel disagree on shared memory");
static_assert(TILE_M == ROW_BLOCKS * WARPS * 16, "warps must divide the query tile into 16-row blocks");

// What a warp keeps from key tile to key tile.
struct Rows {
  uint32_t q[D_QK / 16][ROW_BLOCKS][4];
  float o[ROW_BLOCKS][V_OCTETS][4];
  tile::SoftmaxRows<ROW_BLOCKS> softmax;
};

// Scores of keys that are not kept -> -inf.
AFC_FN void finish_scores(float (&s)[ROW_BLOCKS][KEY_OCTETS][4],
                          const Row *rows, const Column *columns, int first_row, int first_key, const Item &item,
                          const tile::Places &places, const afc_args &args) {
  const int keys = places.keys;
  const int last_row = static_cast<int>(args.M) - 1;
  const int q_origin = static_cast<int>(places.q_origin), k_origin = static_cast<int>(places.k_origin);
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < KEY_OCTETS; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = first_key + c * 8 + tile::fragment_column() + e % 2;
        const int m = min(first_row + r * 16 + e / 2 * 8, last_row);  // rows beyond the tensor repeat the last, unseen
        const int i = m + q_origin, j = n + k_origin;
        const bool inside = n < keys && keep(m, n, i, j, rows[r * 16 + e / 2 * 8], columns[c * 8 + e % 2], item, args);
        s[r][c][e] = inside ? s[r][c][e] : -tile::INFINITE;
      }
}

// One key tile: S = Q K^T, scores, online softmax, O += P V. `finite`: all of V is; else what a row does not see must
// not reach it.
template <bool FULL>
AFC_FN void key_tile(Rows &state, uint32_t q_tile, uint32_t stage, const tile::Blocks<TileK> &k_blocks,
                     const tile::Blocks<TileV> &v_blocks, const Row *rows, const Column *columns, int first_row, int first_key, bool finite, const Item &item,
                     const tile::Places &places, const afc_args &args) {
  float s[ROW_BLOCKS][KEY_OCTETS][4];
  tile::clear(s);
  tile::multiply_rows<Element>(s, state.q, k_blocks, stage);
  if constexpr (!FULL) finish_scores(s, rows, columns, first_row, first_key, item, places, args);
  tile::softmax_step<FULL>(s, state.softmax, state.o, SCALE_LOG2);
  uint32_t p[TILE_N / 16][ROW_BLOCKS][4];
  tile::round_to_operand<Element>(p, s);
  if (!FULL && !finite) {
    tile::mark_infinite<Element>(p, tile::row_major_blocks<TileV>(0), stage + TileK::BYTES);
    tile::drop_infinite_rows<Element, TileV, THREADS>(shared_memory + (stage - q_tile) + TileK::BYTES);
  }
  tile::multiply_columns<Element>(state.o, p, v_blocks, stage + TileK::BYTES);
}

}  // namespace packed_forward_parts

extern "C" __global__ void __launch_bounds__(256, 1)
    packed_forward(const __grid_constant__ afc_args args) {
  using namespace packed_forward_parts;
  const int rows_total = static_cast<int>(args.M);
  const int heads = static_cast<int>(args.Hq);
  const int warp_row = tile::warp_index(threadIdx.x) * (ROW_BLOCKS * 16);

  // ---- work item
  const tile::WorkItem work = tile::work_item(blockIdx.x, tile::ceil_div(rows_total, TILE_M), heads,
                                              static_cast<int>(args.B), SECTION,
                                              true);
  const int first_row = work.tile * TILE_M;
  const int valid_rows = min(TILE_M, rows_total - first_row);
  const int kv_head = work.head / (heads / static_cast<int>(args.Hk));

  // ---- Q, on its way while the walk is found
  const uint32_t q_tile = ptx::shared_address(shared_memory);
  tile::copy_rows_async<TileQ, THREADS>(q_tile, tile::row_address(args.q, work.batch, work.head, first_row),
                                        args.q.stride[2] * 2, valid_rows, threadIdx.x);
  ptx::cp_async_commit();
  tile::TileRotation<Element, TileQ, QRotation0, THREADS> rotation_0(QRotation0::table(args, work.batch, work.head, first_row), valid_rows);

  // ---- what the tiles need
  const Item item = load_item(args, work.batch, work.head);
  __shared__ tile::WorkItem work_at_end;  // not kept in registers, which the main loop needs
  __shared__ tile::Places places;
  __shared__ tile::StoredWalk stored_walk;
  if (threadIdx.x == 0) {
    work_at_end = work;
    places = tile::places_of(args, work.batch);
    const int tiles = tile::ceil_div(rows_total, TILE_M);
    const int4 *runs = static_cast<const int4 *>(args.buffer[7]);
    stored_walk.set(runs + (static_cast<int64_t>(work.batch) * tiles + work.tile) * tile::RUN_ROW, 0, 1);
  }
  __syncthreads();
  const tile::WalkInRegisters walk(stored_walk);

  // ---- first key tile
  const afc_tensor k_rows = tile::contiguous(args.buffer[2], args.Hk, args.N, D_QK);  // rotated
  const unsigned char *k = tile::row_address(k_rows, work.batch, kv_head, 0);
  const unsigned char *v = tile::row_address(args.v, work.batch, kv_head, 0);
  const int64_t k_stride = k_rows.stride[2] * 2, v_stride = args.v.stride[2] * 2;
  const uint32_t stages = q_tile + TileQ::BYTES;
  auto copy_keys = [&](int step) {
    const uint32_t stage = stages + (step & 1) * STAGE_BYTES;
    const int first_key = walk.tile(step) * TILE_N, valid_keys = places.keys - first_key;
    const uint32_t thread = tile::thread_in_step(step);
    tile::copy_rows_async<TileK, THREADS>(stage, k + first_key * k_stride, k_stride, valid_keys, thread);
    tile::copy_rows_async<TileV, THREADS>(stage + TileK::BYTES, v + first_key * v_stride, v_stride, valid_keys, thread);
  };

  if (walk.count > 0) copy_keys(0);
  ptx::cp_async_commit();

  // ---- rotate Q
  ptx::cp_async_wait<1>();
  __syncthreads();
  rotation_0.apply(shared_memory);

  // ---- key tiles: wait for this one, start the copy of the next, compute
  Rows rows;
  tile::clear(rows.o);
  tile::clear(rows.softmax);
  const auto q_blocks = tile::column_major_blocks<TileQ>(warp_row);
  const auto k_blocks = tile::row_major_blocks<TileK>(0);
  const auto v_blocks = tile::column_major_blocks<TileV>(0);
  ptx::cp_async_wait<1>();
  __syncthreads();
  tile::load_operand(rows.q, q_blocks, q_tile);

  auto copy_next = [&](int step) {  // returns the stage of this one
    if (threadIdx.x == 0) stored_walk.advance(step);
    if (step + 1 < walk.count) copy_keys(step + 1);
    ptx::cp_async_commit();
    return stages + (step & 1) * STAGE_BYTES;
  };
  auto lane_row = [&](int step) {  // query row of this lane in its warp's first row block, upper half
    const uint32_t thread = tile::thread_in_step(step);
    return first_row + static_cast<int>(thread / 32 * (ROW_BLOCKS * 16) + thread % 32 / 4);
  };

  // ---- what the elements read of captured tensors: each value once, by one thread; Q has left its place for it
  constexpr int READ_BYTES = TILE_M * sizeof(Row) + 2 * TILE_N * sizeof(Column);
  constexpr bool IN_Q = READ_BYTES <= TileQ::BYTES;
  __shared__ __align__(16) unsigned char read_apart[IN_Q ? 16 : READ_BYTES];
  unsigned char *read_place = IN_Q ? shared_memory : read_apart;
  if (IN_Q) __syncthreads();  // all have loaded Q
  Row *rows_read = reinterpret_cast<Row *>(read_place);
  for (int k = threadIdx.x; k < TILE_M; k += THREADS) {
    const int m = min(first_row + k, rows_total - 1);
    rows_read[k] = load_row(m, m + static_cast<int>(places.q_origin), item, args);
  }
  Column *columns_read = reinterpret_cast<Column *>(read_place + TILE_M * sizeof(Row));  // of two tiles
  auto read_columns = [&](int step) {
    for (int k = THREADS - 1 - threadIdx.x; k < TILE_N; k += THREADS) {  // by other warps than the rows
      const int n = walk.tile(step) * TILE_N + k;
      columns_read[(step & 1) * TILE_N + k] = load_column(n, n + static_cast<int>(places.k_origin), item, args);
    }
  };
#pragma unroll 1
  for (int step = 0; step < walk.partial; ++step) {
    read_columns(step);
    ptx::cp_async_wait<0>();
    const unsigned char *v_tile = shared_memory + TileQ::BYTES + (step & 1) * STAGE_BYTES + TileK::BYTES;
    const bool infinite = tile::holds_infinite<Element, TileV, THREADS>(v_tile, tile::thread_in_step(step));
    const bool finite = __syncthreads_or(infinite) == 0;  // a barrier as the one below
    const uint32_t stage = copy_next(step);
    key_tile<false>(rows, q_tile, stage, k_blocks, v_blocks, rows_read + (lane_row(step) - first_row), columns_read + (step & 1) * TILE_N + tile::fragment_column(), lane_row(step), walk.tile(step) * TILE_N, finite, item,
                    places, args);
  }
#pragma unroll 1
  for (int step = walk.partial; step < walk.count; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the copies of all threads are visible, and nobody reads the other stage any more
    const uint32_t stage = copy_next(step);
    key_tile<true>(rows, q_tile, stage, k_blocks, v_blocks, rows_read + (lane_row(step) - first_row), columns_read + (step & 1) * TILE_N + tile::fragment_column(), lane_row(step), walk.tile(step) * TILE_N, true, item,
                   places, args);
  }

  // ---- O and LSE
  const int batch = work_at_end.batch, head = work_at_end.head, first_o = work_at_end.tile * TILE_M;
  const int first_lse = first_o + tile::warp_index(threadIdx.x) * (ROW_BLOCKS * 16) + tile::fragment_row();
  float lse[ROW_BLOCKS][2];
  tile::softmax_finish(rows.o, rows.softmax, lse, SOFTMAX_SCALE);
  ptx::cp_async_wait<0>();
  __syncthreads();
  tile::round_to_tile<Element, TileO>(shared_memory, rows.o, tile::warp_index(threadIdx.x) * (ROW_BLOCKS * 16));
  __syncthreads();
  tile::store_rows<TileO, THREADS>(shared_memory, tile::row_address(args.o, batch, head, first_o), args.o.stride[2] * 2,
                                   static_cast<int>(args.M) - first_o);
  if (args.lse.data != nullptr && threadIdx.x % 4 == 0) {
    float *lse_rows = static_cast<float *>(args.lse.data) + batch * args.lse.stride[0] + head * args.lse.stride[1];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t m = first_lse + r * 16 + half * 8;
        if (m < args.M) lse_rows[m * args.lse.stride[2]] = lse[r][half];
      }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_rotate_backward: rotation tables and rotated rows, once for all that reads them
//
// The x index of a CTA is a block of 16 rows of q, then of k; its y index is a share of the (batch, head)s.
// Coefficients are computed in double precision, by each CTA once for all (batch, head)s of its share that have them.
// Two CTAs on an SM have enough rows on their way; a bound of more makes ptxas spill.
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256, 2) packed_rotate_backward(const __grid_constant__ afc_args args) {
  constexpr int THREADS = 256, TILE_ROWS = 16;
  int block = blockIdx.x;

  {
    const int rows = static_cast<int>(args.M), first_row = block * TILE_ROWS;
    const int valid_rows = min(TILE_ROWS, rows - first_row);
    const tile::Tables tables = QRotation0::tables(args);
    const afc_tensor rotated = tile::contiguous(args.buffer[0], tables.heads, rows, 128);
    // One table after the other; its (batch, head)s are divided into parts.
    const int shares = min(tables.batches * tables.heads, static_cast<int>(gridDim.y));
    const int parts = max(1, shares / max(tables.count(), 1));
    for (int share = blockIdx.y; share < tables.count() * parts; share += gridDim.y) {
      const int table = share / parts, part = share % parts;
      const tile::Members members = tables.members(table, part, parts);
      const int b = tables.batch(table), h = tables.head(table);
      const int origin = static_cast<int>(
          tile::origin_of(args.q_origin_per_batch, args.q_origin, b, args.M));
      {
        using R = QRotation0;
        __shared__ __align__(16) float coefficients[TILE_ROWS * R::PAIRS * R::COEFFICIENTS];
        __syncthreads();  // nobody reads those of the table before any more
        tile::compute_coefficients<R, THREADS>(coefficients, args, b, h, origin, first_row, valid_rows,
                                               part == 0);
        tile::rotate_rows<Element, R, THREADS, TILE_ROWS>(args.q, rotated, coefficients, first_row, valid_rows, tables.heads, members,
                                               nullptr);
      }
    }
    block -= tile::ceil_div(rows, TILE_ROWS);
    if (block < 0) return;
  }

  {
    const int rows = static_cast<int>(args.N), first_row = block * TILE_ROWS;
    const int valid_rows = tile::keys_in_use(args, first_row) ? min(TILE_ROWS, rows - first_row) : 0;
    const tile::Tables tables = KRotation0::tables(args);
    const afc_tensor rotated = tile::contiguous(args.buffer[2], tables.heads, rows, 128);
    // One table after the other; its (batch, head)s are divided into parts.
    const int shares = min(tables.batches * tables.heads, static_cast<int>(gridDim.y));
    const int parts = max(1, shares / max(tables.count(), 1));
    for (int share = blockIdx.y; share < tables.count() * parts; share += gridDim.y) {
      const int table = share / parts, part = share % parts;
      const tile::Members members = tables.members(table, part, parts);
      const int b = tables.batch(table), h = tables.head(table);
      const int origin = static_cast<int>(
          tile::origin_of(args.k_origin_per_batch, args.k_origin, b, args.N));
      {
        using R = KRotation0;
        __shared__ __align__(16) float coefficients[TILE_ROWS * R::PAIRS * R::COEFFICIENTS];
        __syncthreads();  // nobody reads those of the table before any more
        tile::compute_coefficients<R, THREADS>(coefficients, args, b, h, origin, first_row, valid_rows,
                                               part == 0);
        tile::rotate_rows<Element, R, THREADS, TILE_ROWS>(args.k, rotated, coefficients, first_row, valid_rows, tables.heads, members,
                                               args.kv_len_per_batch);
      }
    }
    block -= tile::ceil_div(rows, TILE_ROWS);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_preprocess: what backward needs of each query row, and a dQ sum of zeros
//
// row terms [B][Hq][M][2]: the log-sum-exp in units of log2 (+inf for a row without keys: its weights become 0), and
// delta = sum(dO o O) - dLSE. A CTA handles 32 rows of one (batch, head), eight lanes to a row.
// ---------------------------------------------------------------------------------------------------------------------
namespace packed_preprocess_parts {

constexpr int D_QK = 128, D_V = 128, TILE_ROWS = 32, THREADS = TILE_ROWS * 8;
constexpr float LOG2E = 1.4426950408889634f;
static_assert(TILE_ROWS % 16 == 0, "the dQ sum consists of blocks of 16 rows");

// Eight neighbouring elements of a row whose elements are `stride` apart; `vector`: adjacent and 16-byte aligned.
AFC_FN void load_eight(float (&x)[8], const unsigned char *row, int64_t stride, int column, bool vector) {
  uint32_t pair[4];
  if (vector) {
    const uint4 chunk = *reinterpret_cast<const uint4 *>(row + column * 2);
    pair[0] = chunk.x, pair[1] = chunk.y, pair[2] = chunk.z, pair[3] = chunk.w;
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint16_t *low = reinterpret_cast<const uint16_t *>(row) + (column + 2 * w) * stride;
      pair[w] = low[0] | static_cast<uint32_t>(low[stride]) << 16;
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    x[2 * w] = tile::unpack_low<Element>(pair[w]);
    x[2 * w + 1] = tile::unpack_high<Element>(pair[w]);
  }
}

// This lane's share of sum(dO o O): every eighth chunk of the row.
AFC_FN float partial_delta(const unsigned char *o, const unsigned char *d_o, int64_t d_o_stride, bool vector) {
  float sum = 0.0f;
#pragma unroll
  for (int column = 0; column < D_V; column += 64) {
    const int mine = column + threadIdx.x % 8 * 8;
    if (D_V % 64 != 0 && mine >= D_V) break;
    float x[8], y[8];
    load_eight(x, o, 1, mine, true);
    load_eight(y, d_o, d_o_stride, mine, vector);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
  }
  return sum;
}

AFC_FN bool is_vector(const afc_tensor &x) {
  const int64_t all = x.stride[0] | x.stride[1] | x.stride[2];
  return x.stride[3] == 1 && all % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace packed_preprocess_parts

extern "C" __global__ void __launch_bounds__(256) packed_preprocess(const __grid_constant__ afc_args args) {
  using namespace packed_preprocess_parts;
  const int rows = static_cast<int>(args.M), heads = static_cast<int>(args.Hq);
  const int tiles = tile::ceil_div(rows, TILE_ROWS);
  const int batch_head = blockIdx.x / tiles, first_row = (blockIdx.x - batch_head * tiles) * TILE_ROWS;
  const int batch = batch_head / heads, head = batch_head - batch * heads;

  // ---- row terms
  const int row = first_row + threadIdx.x / 8;
  float delta = 0.0f;
  if (row < rows) {
    const int64_t stride = args.d_o.stride[3];
    const unsigned char *d_o = tile::row_address(args.d_o, batch, head, row);
    delta = partial_delta(tile::row_address(args.o, batch, head, row), d_o, stride, is_vector(args.d_o));
  }
  delta += __shfl_xor_sync(0xffffffffu, delta, 1);
  delta += __shfl_xor_sync(0xffffffffu, delta, 2);
  delta += __shfl_xor_sync(0xffffffffu, delta, 4);
  if (row < rows && threadIdx.x % 8 == 0) {
    const auto value = [&](const afc_tensor &x) {
      return static_cast<const float *>(x.data)[batch * x.stride[0] + head * x.stride[1] + row * x.stride[2]];
    };
    const float lse = value(args.lse);
    if (args.dlse.data != nullptr) delta -= value(args.dlse);
    float2 *terms = static_cast<float2 *>(args.buffer[4]) + static_cast<int64_t>(batch_head) * rows;
    terms[row] = {lse == -tile::INFINITE ? tile::INFINITE : lse * LOG2E, delta};
  }

  // ---- dQ sum
  if (args.flags & AFC_DETERMINISTIC) return;  // there is none
  const int blocks = min(TILE_ROWS / 16, tile::ceil_div(rows - first_row, 16));
  float4 *sum = reinterpret_cast<float4 *>(static_cast<float *>(args.buffer[5]) +
                                           tile::block_offset<D_QK>(batch_head, rows, first_row / 16, 0));
  for (int index = threadIdx.x; index < blocks * 16 * D_QK / 4; index += THREADS) sum[index] = {0.0f, 0.0f, 0.0f, 0.0f};
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_backward: dK, dV, and what each key tile adds to dQ
//
// A CTA holds 128 keys of one (batch, KV head) and walks over the queries of the head group, 32 rows at a time.
//
//   S^T = K Q^T     P = exp2(score(S) - lse)     dV  += P^T dO
//   dP^T = V dO^T   dS = P (dP - delta)          dK  += dS^T Q       dQ += dS K
// AFC_DETERMINISTIC: dQ comes from a kernel of its own.
//
// Warps share out S and dP as 8 along the keys x 1 along the queries, dK and dV as 4 along the keys x
// 2 along the columns, dQ as 2 along the queries x 4 along the columns: P and dS change hands in shared memory, so that
// every warp multiplies blocks that are nearly square and reads few of them.
// ---------------------------------------------------------------------------------------------------------------------
namespace packed_backward_parts {

constexpr int D_QK = 128, D_V = 128, TILE_M = 32, TILE_N = 128;
constexpr int KEY_WARPS = 8, QUERY_WARPS = 1;        // how S and dP are shared out
constexpr int SUM_KEY_WARPS = 4, COLUMN_WARPS = 2;     // dK and dV
constexpr int DQ_ROW_WARPS = 2, DQ_COLUMN_WARPS = 4;  // dQ
constexpr int WARPS = KEY_WARPS * QUERY_WARPS, THREADS = WARPS * 32;
// What is a warp's, in blocks of 16 or octets.
constexpr int KEY_BLOCKS = TILE_N / KEY_WARPS / 16, QUERY_BLOCKS = TILE_M / QUERY_WARPS / 16;
constexpr int SUM_KEY_BLOCKS = TILE_N / SUM_KEY_WARPS / 16;
constexpr int DK_OCTETS = tile::ceil_div(D_QK / 16, COLUMN_WARPS) * 2, DV_OCTETS = tile::ceil_div(D_V / 16, COLUMN_WARPS) * 2;
constexpr int DQ_ROW_BLOCKS = TILE_M / DQ_ROW_WARPS / 16, DQ_OCTETS = tile::ceil_div(D_QK / 16, DQ_COLUMN_WARPS) * 2;
constexpr int STAGES = 2;  // of Q and dO
constexpr int SECTION = 8;  // KV heads worked on at a time
constexpr float SCALE_LOG2 = 0.12751743082459868f;
constexpr float GRADIENT_SCALE = 0.08838834764831845f;

using TileK = tile::SharedTile<TILE_N, D_QK>;
using TileV = tile::SharedTile<TILE_N, D_V>;
using TileQ = tile::SharedTile<TILE_M, D_QK>;
using TileDO = tile::SharedTile<TILE_M, D_V>;
using TileP = tile::SharedTile<TILE_N, TILE_M>;  // P and dS, [key][query]

// Shared memory: K | stages, each Q | dO, then P | dS | two stages of row terms.
constexpr int Q_OFFSET = TileK::BYTES;
constexpr int DO_OFFSET = Q_OFFSET + TileQ::BYTES;
constexpr int STAGE_BYTES = TileQ::BYTES + TileDO::BYTES;
constexpr int P_OFFSET = Q_OFFSET + STAGES * STAGE_BYTES;
constexpr int DS_OFFSET = P_OFFSET + TileP::BYTES;
constexpr int DS_END = DS_OFFSET + TileP::BYTES;
constexpr int TERMS_OFFSET = DS_END;
constexpr int TERMS_BYTES = TILE_M * 8;
constexpr int INPUT_BYTES = TERMS_OFFSET + 2 * TERMS_BYTES;
constexpr int V_OFFSET = DS_END - TileV::BYTES;  // V passes through what is not used before the first step
static_assert(V_OFFSET >= Q_OFFSET + STAGE_BYTES, "V must leave stage 0 alone");
// At the end over all of it: dK | dV.
constexpr int DV_OFFSET = TileK::BYTES;
constexpr int OUTPUT_BYTES = DV_OFFSET + TileV::BYTES;
constexpr int SHARED_BYTES = tile::larger(INPUT_BYTES, OUTPUT_BYTES);
static_assert(SHARED_BYTES == 82432, "the launch plan and the kernel disagree on shared memory");
static_assert(TILE_N == KEY_WARPS * KEY_BLOCKS * 16 && TILE_M == QUERY_WARPS * QUERY_BLOCKS * 16, "16x16 blocks");
static_assert(TILE_N == SUM_KEY_WARPS * SUM_KEY_BLOCKS * 16 && SUM_KEY_WARPS * COLUMN_WARPS == WARPS, "16x16 blocks");
static_assert(TILE_M == DQ_ROW_WARPS * DQ_ROW_BLOCKS * 16 && DQ_ROW_WARPS * DQ_COLUMN_WARPS == WARPS, "16x16 blocks");
constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }
static_assert(is_power_of_two(COLUMN_WARPS) && is_power_of_two(DQ_COLUMN_WARPS) && is_power_of_two(DQ_ROW_BLOCKS) &&
                  is_power_of_two(QUERY_BLOCKS), "what Blocks::from_column_block needs");
static_assert(TILE_M <= THREADS, "one thread copies the terms of one row");

// A lane's place in the CTA.
struct Place {
  uint32_t key_warp, query_warp, sum_key_warp, column_warp, dq_row_warp, dq_column_warp;
  int key, query;  // of accumulator element 0 of S^T, relative to the tiles
};

AFC_FN Place place(uint32_t thread) {
  const uint32_t warp = tile::warp_index(thread);
  Place p;
  p.key_warp = warp % KEY_WARPS;
  p.query_warp = QUERY_WARPS == 1 ? 0 : warp / KEY_WARPS;
  p.sum_key_warp = warp % SUM_KEY_WARPS;
  p.column_warp = COLUMN_WARPS == 1 ? 0 : warp / SUM_KEY_WARPS;
  p.dq_row_warp = warp % DQ_ROW_WARPS;
  p.dq_column_warp = DQ_COLUMN_WARPS == 1 ? 0 : warp / DQ_ROW_WARPS;
  p.key = p.key_warp * (KEY_BLOCKS * 16) + thread % 32 / 4;
  p.query = p.query_warp * (QUERY_BLOCKS * 16) + thread % 4 * 2;
  return p;
}

// S^T -> P^T, rounded as operand A; s becomes the factor of dP - delta in dS^T. FULL: every element is kept.
template <bool FULL>
AFC_FN void weights(uint32_t (&p)[QUERY_BLOCKS][KEY_BLOCKS][4], float (&s)[KEY_BLOCKS][QUERY_BLOCKS * 2][4],
                    const float *terms, const Row *rows, const Column *columns, int first_key, int first_query,
                    const Item &item, const tile::Places &places, const afc_args &args) {
  const int keys = places.keys, queries = static_cast<int>(args.M);
  const int q_origin = static_cast<int>(places.q_origin), k_origin = static_cast<int>(places.k_origin);
#pragma unroll
  for (int c = 0; c < QUERY_BLOCKS * 2; ++c) {
    const float4 two_rows = *reinterpret_cast<const float4 *>(terms + c * 16);  // lse, delta, lse, delta
#pragma unroll
    for (int r = 0; r < KEY_BLOCKS; ++r) {
      float weight[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = first_query + c * 8 + e % 2, n = first_key + r * 16 + e / 2 * 8;
        const int i = m + q_origin, j = n + k_origin;
        const bool live = FULL || (n < keys && m < args.M && keep(m, n, i, j, rows[c * 8 + e % 2], columns[r * 16 + e / 2 * 8], item, args));
        const float lse = e % 2 == 0 ? two_rows.x : two_rows.z;
        const float x = live ? s[r][c][e] : -tile::INFINITE;
        weight[e] = ptx::exp2_approx(fmaf(x, SCALE_LOG2, -lse));
        s[r][c][e] = weight[e];
      }
      p[c / 2][r][c % 2 * 2] = Element::pack(weight[0], weight[1]);
      p[c / 2][r][c % 2 * 2 + 1] = Element::pack(weight[2], weight[3]);
    }
  }
}

// dP^T -> dS^T, rounded as operand A. A factor of 0 stays 0: where nothing is kept, V may hold anything.
template <bool FULL>
AFC_FN void score_gradients(uint32_t (&ds)[QUERY_BLOCKS][KEY_BLOCKS][4],
                            const float (&factor)[KEY_BLOCKS][QUERY_BLOCKS * 2][4],
                            const float (&dp)[KEY_BLOCKS][QUERY_BLOCKS * 2][4], const float *terms) {
#pragma unroll
  for (int c = 0; c < QUERY_BLOCKS * 2; ++c) {
    const float4 two_rows = *reinterpret_cast<const float4 *>(terms + c * 16);
#pragma unroll
    for (int r = 0; r < KEY_BLOCKS; ++r) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float d_weight = dp[r][c][e];
        const float product = factor[r][c][e] * (d_weight - (e % 2 == 0 ? two_rows.y : two_rows.w));
        x[e] = FULL || factor[r][c][e] != 0.0f ? product : 0.0f;
      }
      ds[c / 2][r][c % 2 * 2] = Element::pack(x[0], x[1]);
      ds[c / 2][r][c % 2 * 2 + 1] = Element::pack(x[2], x[3]);
    }
  }
}

// dS K of this warp's rows and columns of dQ, added to the sum in global memory. `finite`: all of K is, or every element is kept.
AFC_FN void add_dq(float *sum, uint32_t shared, const tile::Blocks<TileP> &ds_blocks,
                   const tile::Blocks<TileK> &k_blocks, const Place &at, int batch_head, int first_query, int queries,
                   bool finite) {
  const int mine = tile::column_blocks_of_warp<D_QK, DQ_COLUMN_WARPS>(at.dq_column_warp);
  float dq[DQ_ROW_BLOCKS][DQ_OCTETS][4];
  tile::clear(dq);
  if (finite)
    tile::multiply_transposed<Element, DQ_COLUMN_WARPS>(dq, ds_blocks, shared + DS_OFFSET, k_blocks, shared, mine);
  else
    tile::multiply_transposed<Element, DQ_COLUMN_WARPS, false>(dq, ds_blocks, shared + DS_OFFSET, k_blocks, shared,
                                                               mine);
#pragma unroll
  for (int r = 0; r < DQ_ROW_BLOCKS; ++r) {
    const int row_block = first_query / 16 + at.dq_row_warp * DQ_ROW_BLOCKS + r;
    if (row_block * 16 >= queries) break;
    float *row = sum + tile::block_offset<D_QK>(batch_head, queries, row_block, at.dq_column_warp);
#pragma unroll
    for (int c = 0; c < DQ_OCTETS; ++c) {
      if (c / 2 >= mine) break;
      tile::add_octet(row + c / 2 * DQ_COLUMN_WARPS * tile::BLOCK_FLOATS, c % 2, dq[r][c]);
    }
  }
}

}  // namespace packed_backward_parts

extern "C" __global__ void __launch_bounds__(256, 1)
    packed_backward(const __grid_constant__ afc_args args) {
  using namespace packed_backward_parts;
  const int queries = static_cast<int>(args.M), keys = static_cast<int>(args.N);
  const int heads = static_cast<int>(args.Hq), kv_heads = static_cast<int>(args.Hk), group = heads / kv_heads;
  // ---- work item. In a ragged key tile every query tile is partial: a zero row of K has a weight that may overflow.
  // Work and walk are in shared memory, because the main loop needs the registers.
  __shared__ tile::WorkItem work;
  __shared__ tile::StoredWalk walk;
  __shared__ tile::Places places;
  if (threadIdx.x == 0) {
    work = tile::work_item(blockIdx.x, tile::ceil_div(keys, TILE_N), kv_heads, static_cast<int>(args.B), SECTION,
                           false);
    places = tile::places_of(args, work.batch);
    const int tiles = tile::ceil_div(keys, TILE_N);
    const int4 *runs = static_cast<const int4 *>(args.buffer[8]);
    walk.set(runs + (static_cast<int64_t>(work.batch) * tiles + work.tile) * tile::RUN_ROW, 0, group);
  }
  __syncthreads();

  // ---- tensors
  const afc_tensor q_rows = tile::contiguous(args.buffer[0], args.Hq, args.M, D_QK);  // rotated
  const afc_tensor k_rows = tile::contiguous(args.buffer[2], args.Hk, args.N, D_QK);  // rotated
  const float *row_terms = static_cast<const float *>(args.buffer[4]);
  float *dq_sum = static_cast<float *>(args.buffer[5]);
  const uint32_t shared = ptx::shared_address(shared_memory);

  // ---- copies: K and V once; Q, dO and row terms per step
  tile::copy_rows_async<TileK, THREADS>(shared, tile::row_address(k_rows, work.batch, work.head, work.tile * TILE_N),
                                        k_rows.stride[2] * 2, places.keys - work.tile * TILE_N, threadIdx.x);
  tile::copy_rows_async<TileV, THREADS>(shared + V_OFFSET,
                                        tile::row_address(args.v, work.batch, work.head, work.tile * TILE_N),
                                        args.v.stride[2] * 2, places.keys - work.tile * TILE_N, threadIdx.x);
  auto copy_q = [&](int step, const tile::StoredWalk::Position &next) {
    const int first = walk.tile(next) * TILE_M, head = work.head * group + next.member;
    tile::copy_rows_async<TileQ, THREADS>(shared + Q_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES,
                                          tile::row_address(q_rows, work.batch, head, first), q_rows.stride[2] * 2,
                                          queries - first, tile::thread_in_step(step));
  };
  auto copy_do = [&](int step, const tile::StoredWalk::Position &next) {
    const int first = walk.tile(next) * TILE_M, head = work.head * group + next.member;
    tile::copy_rows_async<TileDO, THREADS>(shared + DO_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES,
                                           tile::row_address(args.d_o, work.batch, head, first),
                                           args.d_o.stride[2] * 2, queries - first, tile::thread_in_step(step));
  };
  auto copy_terms = [&](int step, const tile::StoredWalk::Position &next) {
    const int row = walk.tile(next) * TILE_M + threadIdx.x, head = work.head * group + next.member;
    if (threadIdx.x >= TILE_M) return;
    const int64_t index = (static_cast<int64_t>(work.batch) * heads + head) * queries + row;
    ptx::cp_async_8(shared + TERMS_OFFSET + (step & 1) * TERMS_BYTES + threadIdx.x * 8, row_terms + index * 2,
                    row < queries);
  };
  if (walk.count > 0) {
    copy_q(0, walk.position(0));
    copy_do(0, walk.position(0));
    copy_terms(0, walk.position(0));
  }
  ptx::cp_async_commit();

  // ---- accumulators and the lane's views of the tiles
  float dk[SUM_KEY_BLOCKS][DK_OCTETS][4], dv[SUM_KEY_BLOCKS][DV_OCTETS][4];
  tile::clear(dk);
  tile::clear(dv);
  ptx::cp_async_wait<0>();
  __syncthreads();
  const uint32_t first_key_row = place(threadIdx.x).key_warp * (KEY_BLOCKS * 16);
  uint32_t k_operand[D_QK / 16][KEY_BLOCKS][4];
  tile::load_operand(k_operand, tile::column_major_blocks<TileK>(first_key_row), shared);
  uint32_t v_operand[D_V / 16][KEY_BLOCKS][4];
  tile::load_operand(v_operand, tile::column_major_blocks<TileV>(first_key_row), shared + V_OFFSET);

  // Where elements are tested, what is not finite in K, Q or dO must not reach rows that it is hidden from.
  __shared__ bool keys_finite;
  if (walk.partial > 0) {
    ptx::cp_async_wait<0>();
    const bool infinite = tile::holds_infinite<Element, TileK, THREADS>(shared_memory, threadIdx.x);
    const bool finite = __syncthreads_or(infinite) == 0;
    if (threadIdx.x == 0) keys_finite = finite;
  }
  // What the step's elements read of captured tensors: each value once, by one thread.
  __shared__ Row rows_read[TILE_M];
  __shared__ Column columns_read[TILE_N];
  auto read_terms = [&](const tile::StoredWalk::Position &now) {
    const Item item = load_item(args, work.batch, work.head * group + now.member);
    const int q_origin = static_cast<int>(places.q_origin), k_origin = static_cast<int>(places.k_origin);
    for (int k = threadIdx.x; k < TILE_M; k += THREADS) {
      const int m = walk.tile(now) * TILE_M + k;
      rows_read[k] = load_row(m, m + q_origin, item, args);
    }
    for (int k = THREADS - 1 - threadIdx.x; k < TILE_N; k += THREADS) {  // by other warps than the rows
      const int n = work.tile * TILE_N + k;
      columns_read[k] = load_column(n, n + k_origin, item, args);
    }
  };
  auto query_tile = [&](auto full, int step) {
    constexpr bool FULL = decltype(full)::value;
    if constexpr (!FULL) read_terms(walk.position(step));
    ptx::cp_async_wait<0>();
    bool finite = true;  // Q and dO
    if constexpr (FULL) {
      __syncthreads();  // the copies of all threads are visible, and the step before is over
    } else {
      const uint32_t thread = tile::thread_in_step(step);
      const unsigned char *q_bytes = shared_memory + Q_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES;
      const unsigned char *do_bytes = shared_memory + DO_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES;
      finite = __syncthreads_or(tile::holds_infinite<Element, TileQ, THREADS>(q_bytes, thread) ||
                                tile::holds_infinite<Element, TileDO, THREADS>(do_bytes, thread)) == 0;
    }
    const tile::StoredWalk::Position now = walk.position(step), next = walk.position(step + 1);
    if (threadIdx.x == 0) walk.advance(step);
    const int first_query = walk.tile(now) * TILE_M;
    const uint32_t q_tile = shared + Q_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES;
    const uint32_t do_tile = shared + DO_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES;
    const uint32_t thread = tile::thread_in_step(step), lane = thread % tile::WARP;
    const Place at = place(thread);
    const unsigned char *stage_terms = shared_memory + TERMS_OFFSET + (step & 1) * TERMS_BYTES;
    const float *terms = reinterpret_cast<const float *>(stage_terms) + at.query * 2;
    if (step + 1 < walk.count) {
      copy_q(step + 1, next);
      copy_do(step + 1, next);
      copy_terms(step + 1, next);
    }
    ptx::cp_async_commit();
    const Item item = load_item(args, work.batch, work.head * group + now.member);

    // The lane's views of the tiles are computed where they are needed, instead of being kept in registers.
    const auto q_blocks = tile::row_major_blocks<TileQ>(at.query_warp * (QUERY_BLOCKS * 16), lane);
    const auto do_blocks = tile::row_major_blocks<TileDO>(at.query_warp * (QUERY_BLOCKS * 16), lane);
    float s[KEY_BLOCKS][QUERY_BLOCKS * 2][4], dp[KEY_BLOCKS][QUERY_BLOCKS * 2][4];
    tile::clear(s);
    tile::clear(dp);
#pragma unroll
    for (int k = 0; k < tile::larger(D_QK, D_V) / 16; ++k) {  // two products at once: more that is independent
      if (k < D_QK / 16) tile::multiply_rows_step<Element>(s, k_operand, q_blocks, q_tile, k);
      if (k < D_V / 16) tile::multiply_rows_step<Element>(dp, v_operand, do_blocks, do_tile, k);
    }
    uint32_t p[QUERY_BLOCKS][KEY_BLOCKS][4];
    weights<FULL>(p, s, terms, rows_read + at.query, columns_read + at.key, work.tile * TILE_N + at.key, first_query + at.query, item, places, args);
    tile::store_operand<TileP>(shared_memory + P_OFFSET, p, at.key_warp * (KEY_BLOCKS * 16), at.query_warp * QUERY_BLOCKS);
    score_gradients<FULL>(p, s, dp, terms);
    tile::store_operand<TileP>(shared_memory + DS_OFFSET, p, at.key_warp * (KEY_BLOCKS * 16), at.query_warp * QUERY_BLOCKS);
    __syncthreads();  // P and dS are complete
    if (!FULL && !finite) {
      const uint32_t stage = Q_OFFSET + (step & (STAGES - 1)) * STAGE_BYTES;
      tile::hide_infinite<Element, TileP, TileQ, TileDO, THREADS>(
          shared_memory + P_OFFSET, shared_memory + stage, shared_memory + stage + TileQ::BYTES);
      __syncthreads();
    }

    const uint32_t sum_thread = tile::thread_in_step(step), sum_lane = sum_thread % tile::WARP;
    const Place sum_place = place(sum_thread);
    const auto p_blocks = tile::column_major_blocks<TileP>(sum_place.sum_key_warp * (SUM_KEY_BLOCKS * 16), sum_lane);
    const auto do_columns = tile::column_major_blocks<TileDO>(0, sum_lane).from_column_block(sum_place.column_warp);
    const auto q_columns = tile::column_major_blocks<TileQ>(0, sum_lane).from_column_block(sum_place.column_warp);
    tile::multiply_tiles<Element, COLUMN_WARPS>(dv, p_blocks, shared + P_OFFSET, do_columns, do_tile,
                                                tile::column_blocks_of_warp<D_V, COLUMN_WARPS>(sum_place.column_warp));
    tile::multiply_tiles<Element, COLUMN_WARPS>(dk, p_blocks, shared + DS_OFFSET, q_columns, q_tile,
                                                tile::column_blocks_of_warp<D_QK, COLUMN_WARPS>(sum_place.column_warp));
    const tile::StoredWalk::Position still = walk.position(step);  // read again rather than kept
    if (args.flags & AFC_DETERMINISTIC) return;
    const uint32_t dq_thread = tile::thread_in_step(step), dq_lane = dq_thread % tile::WARP;
    const Place dq_place = place(dq_thread);
    const auto ds_columns = tile::row_major_blocks<TileP>(0, dq_lane).from_column_block(dq_place.dq_row_warp * DQ_ROW_BLOCKS);
    const auto k_columns = tile::column_major_blocks<TileK>(0, dq_lane).from_column_block(dq_place.dq_column_warp);
    add_dq(dq_sum, shared, ds_columns, k_columns, dq_place, work.batch * heads + work.head * group + still.member,
           walk.tile(still) * TILE_M, queries, FULL || keys_finite);
  };
#pragma unroll 1
  for (int step = 0; step < walk.partial; ++step) query_tile(tile::Constant<bool, false>(), step);
#pragma unroll 1
  for (int step = walk.partial; step < walk.count; ++step) query_tile(tile::Constant<bool, true>(), step);

  // ---- dK and dV
  const Place at = place(threadIdx.x);
  const int warp_key_row = at.sum_key_warp * (SUM_KEY_BLOCKS * 16);
  const int first_key = work.tile * TILE_N, valid_keys = min(TILE_N, keys - first_key);
  const int rotated_keys = min(valid_keys, places.keys - first_key);  // the others have no gradient
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < SUM_KEY_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < DK_OCTETS; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[r][c][e] *= GRADIENT_SCALE;
  unsigned char *dk_rows = tile::row_address(args.dk, work.batch, work.head, first_key);
  unsigned char *dv_rows = tile::row_address(args.dv, work.batch, work.head, first_key);
  tile::round_to_tile<Element, TileV>(shared_memory + DV_OFFSET, dv, warp_key_row, at.column_warp, COLUMN_WARPS);
  tile::rotate_accumulator_back<KRotation0, COLUMN_WARPS>(
      dk, at.column_warp, KRotation0::table(args, work.batch, work.head, first_key), warp_key_row, rotated_keys);
  tile::round_to_tile<Element, TileK>(shared_memory, dk, warp_key_row, at.column_warp, COLUMN_WARPS);
  __syncthreads();
  tile::store_rows<TileK, THREADS>(shared_memory, dk_rows, args.dk.stride[2] * 2, valid_keys);
  tile::store_rows<TileV, THREADS>(shared_memory + DV_OFFSET, dv_rows, args.dv.stride[2] * 2, valid_keys);
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_postprocess: dQ from its float32 sum: scaled, rotated back, rounded once
//
// A CTA handles 32 rows of one (batch, head), as float32 rows in shared memory.
// ---------------------------------------------------------------------------------------------------------------------
namespace packed_postprocess_parts {

constexpr int D_QK = 128, TILE_ROWS = 32, THREADS = 256;
constexpr int PITCH = D_QK + 4;  // floats; keeps rows apart in the banks, and 16-byte aligned
constexpr float GRADIENT_SCALE = 0.08838834764831845f;
static_assert(TILE_ROWS * PITCH * 4 == 16896, "the launch plan and the kernel disagree on shared memory");
static_assert(TILE_ROWS % 16 == 0, "the dQ sum consists of blocks of 16 rows");

}  // namespace packed_postprocess_parts

extern "C" __global__ void __launch_bounds__(256) packed_postprocess(const __grid_constant__ afc_args args) {
  using namespace packed_postprocess_parts;
  const int total_rows = static_cast<int>(args.M), heads = static_cast<int>(args.Hq);
  const int tiles = tile::ceil_div(total_rows, TILE_ROWS);
  const int batch_head = blockIdx.x / tiles, first_row = (blockIdx.x - batch_head * tiles) * TILE_ROWS;
  const int batch = batch_head / heads, head = batch_head - batch * heads;
  const int rows = min(TILE_ROWS, total_rows - first_row);
  float *dq = reinterpret_cast<float *>(shared_memory);

  const float *sum = static_cast<const float *>(args.buffer[5]) +
                     tile::block_offset<D_QK>(batch_head, total_rows, first_row / 16, 0);
  const int quads = tile::ceil_div(rows, 16) * (16 * D_QK / 4);
  constexpr int STEPS = tile::ceil_div(TILE_ROWS * D_QK / 4, THREADS);
  float4 fours[STEPS];  // all on their way at once
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int quad = step * THREADS + threadIdx.x;
    if (quad < quads) fours[step] = reinterpret_cast<const float4 *>(sum)[quad];
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int quad = step * THREADS + threadIdx.x;
    if (quad >= quads) break;
    const float4 &four = fours[step];
    const float values[4] = {four.x, four.y, four.z, four.w};
    const int block = quad / (tile::BLOCK_FLOATS / 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const tile::BlockPosition position = tile::block_position(quad % (tile::BLOCK_FLOATS / 4) * 4 + e);
      const int row = block / (D_QK / 16) * 16 + position.row, column = block % (D_QK / 16) * 16 + position.column;
      dq[row * PITCH + column] = values[e] * GRADIENT_SCALE;
    }
  }
  __syncthreads();
  tile::rotate_rows_back<QRotation0, THREADS>(dq, PITCH, QRotation0::table(args, batch, head, first_row), rows);
  __syncthreads();
  tile::round_rows<Element, D_QK, THREADS>(dq, PITCH, tile::row_address(args.dq, batch, head, first_row),
                                           args.dq.stride[2] * 2, rows);
}

// ---------------------------------------------------------------------------------------------------------------------
// packed_backward_queries: dQ in an order that is always the same (AFC_DETERMINISTIC)
//
// A CTA computes 64 rows of dQ of one (batch, head) with 4 warps. It walks over their keys as the forward does
// and computes scores and weights again, so that no two CTAs add to one row:
//
//   S = Q K^T     P = exp2(score(S) - lse)     dP = dO V^T   dS = P (dP - delta)          dQ += dS K
// ---------------------------------------------------------------------------------------------------------------------
namespace packed_backward_queries_parts {

constexpr int D_QK = 128, D_V = 128;
constexpr int TILE_M = 64, TILE_N = 32, WARPS = 4, THREADS = WARPS * 32;
constexpr int ROW_BLOCKS = TILE_M / WARPS / 16;  // 16-row blocks of a warp
constexpr int KEY_OCTETS = TILE_N / 8, QK_OCTETS = D_QK / 8;
constexpr int SECTION = 8;  // heads worked on at a time
constexpr int PITCH = D_QK + 4;  // of float32 rows of dQ
constexpr float SCALE_LOG2 = 0.12751743082459868f;
constexpr float GRADIENT_SCALE = 0.08838834764831845f;

using TileQ = tile::SharedTile<TILE_M, D_QK>;
using TileDO = tile::SharedTile<TILE_M, D_V>;
using TileK = tile::SharedTile<TILE_N, D_QK>;
using TileV = tile::SharedTile<TILE_N, D_V>;

// Shared memory: Q | dO | K, V of stage 0 | K, V of stage 1; at the end dQ in float32 over all of it.
constexpr int DO_OFFSET = TileQ::BYTES, STAGES_OFFSET = DO_OFFSET + TileDO::BYTES;
constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES;
constexpr int INPUT_BYTES = STAGES_OFFSET + 2 * STAGE_BYTES, ROWS_BYTES = TILE_M * PITCH * 4;
constexpr int SHARED_BYTES = INPUT_BYTES > ROWS_BYTES ? INPUT_BYTES : ROWS_BYTES;
static_assert(SHARED_BYTES == 65536, "the launch plan and the kernel disagree on shared memory");
static_assert(TILE_M == ROW_BLOCKS * WARPS * 16, "warps must divide the query tile into 16-row blocks");

// What a warp keeps from key tile to key tile.
struct Rows {
  float dq[ROW_BLOCKS][QK_OCTETS][4];
  float2 terms[ROW_BLOCKS][2];  // lse in units of log2, delta
};

// Raw products s and dP -> dS, in the place of dP. FULL: every key of the tile is kept, by every row.
template <bool FULL>
AFC_FN void score_gradients(const float (&s)[ROW_BLOCKS][KEY_OCTETS][4], float (&dp)[ROW_BLOCKS][KEY_OCTETS][4],
                            const Rows &rows, int first_row, int first_key, const Item &item,
                            const tile::Places &places, const afc_args &args) {
  const int keys = places.keys;
  const int last_row = static_cast<int>(args.M) - 1;
  const int q_origin = static_cast<int>(places.q_origin), k_origin = static_cast<int>(places.k_origin);
  Row of_rows[ROW_BLOCKS][2];
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = min(first_row + r * 16 + half * 8, last_row);
      of_rows[r][half] = load_row(m, m + q_origin, item, args);
    }
#pragma unroll
  for (int c = 0; c < KEY_OCTETS; ++c) {
    Column columns[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = first_key + c * 8 + tile::fragment_column() + e;
      columns[e] = load_column(n, n + k_origin, item, args);
    }
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = first_key + c * 8 + tile::fragment_column() + e % 2;
        const int m = min(first_row + r * 16 + e / 2 * 8, last_row);  // rows beyond the tensor repeat the last, unseen
        const int i = m + q_origin, j = n + k_origin;
        const bool live = FULL || (n < keys && keep(m, n, i, j, of_rows[r][e / 2], columns[e % 2], item, args));
        const float x = s[r][c][e];
        const float d_weight = dp[r][c][e];
        const float2 terms = rows.terms[r][e / 2];
        const float scored = live ? x : -tile::INFINITE;
        const float weight = ptx::exp2_approx(fmaf(scored, SCALE_LOG2, -terms.x));
        const bool passes = FULL || weight != 0.0f;  // where nothing is kept, V may hold anything
        const float product = weight * (d_weight - terms.y);
        dp[r][c][e] = passes ? product : 0.0f;
      }
  }
}

}  // namespace packed_backward_queries_parts

extern "C" __global__ void __launch_bounds__(128, 1)
    packed_backward_queries(const __grid_constant__ afc_args args) {
  using namespace packed_backward_queries_parts;
  const int rows_total = static_cast<int>(args.M), heads = static_cast<int>(args.Hq);
  const int warp_row = tile::warp_index(threadIdx.x) * (ROW_BLOCKS * 16);

  // ---- work item
  const tile::WorkItem work = tile::work_item(blockIdx.x, tile::ceil_div(rows_total, TILE_M), heads,
                                              static_cast<int>(args.B), SECTION,
                                              true);
  const int first_row = work.tile * TILE_M;
  const int valid_rows = min(TILE_M, rows_total - first_row);
  const int kv_head = work.head / (heads / static_cast<int>(args.Hk));
  const Item item = load_item(args, work.batch, work.head);
  __shared__ tile::WorkItem work_at_end;  // not kept in registers, which the main loop needs
  __shared__ tile::Places places;
  __shared__ tile::StoredWalk walk;
  if (threadIdx.x == 0) {
    work_at_end = work;
    places = tile::places_of(args, work.batch);
    const int tiles = tile::ceil_div(rows_total, TILE_M);
    const int4 *runs = static_cast<const int4 *>(args.buffer[9]);
    walk.set(runs + (static_cast<int64_t>(work.batch) * tiles + work.tile) * tile::RUN_ROW, 0, 1);
  }
  __syncthreads();

  // ---- first copies: Q, dO, and the first key tile
  const afc_tensor q_rows = tile::contiguous(args.buffer[0], args.Hq, args.M, D_QK);  // rotated
  const afc_tensor k_rows = tile::contiguous(args.buffer[2], args.Hk, args.N, D_QK);  // rotated
  const unsigned char *k = tile::row_address(k_rows, work.batch, kv_head, 0);
  const unsigned char *v = tile::row_address(args.v, work.batch, kv_head, 0);
  const int64_t k_stride = k_rows.stride[2] * 2, v_stride = args.v.stride[2] * 2;
  const uint32_t q_tile = ptx::shared_address(shared_memory), do_tile = q_tile + DO_OFFSET;
  auto copy_keys = [&](int step) {
    const uint32_t stage = q_tile + STAGES_OFFSET + (step & 1) * STAGE_BYTES;
    const int first_key = walk.tile(step) * TILE_N, valid_keys = places.keys - first_key;
    const uint32_t thread = tile::thread_in_step(step);
    tile::copy_rows_async<TileK, THREADS>(stage, k + first_key * k_stride, k_stride, valid_keys, thread);
    tile::copy_rows_async<TileV, THREADS>(stage + TileK::BYTES, v + first_key * v_stride, v_stride, valid_keys, thread);
  };
  tile::copy_rows_async<TileQ, THREADS>(q_tile, tile::row_address(q_rows, work.batch, work.head, first_row),
                                        q_rows.stride[2] * 2, valid_rows, threadIdx.x);
  tile::copy_rows_async<TileDO, THREADS>(do_tile, tile::row_address(args.d_o, work.batch, work.head, first_row),
                                         args.d_o.stride[2] * 2, valid_rows, threadIdx.x);
  if (walk.count > 0) copy_keys(0);
  ptx::cp_async_commit();

  // ---- key tiles: wait for this one, start the copy of the next, compute
  Rows rows;
  tile::clear(rows.dq);
  const float2 *row_terms = static_cast<const float2 *>(args.buffer[4]) +
                            (static_cast<int64_t>(work.batch) * heads + work.head) * rows_total;
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rows.terms[r][half] = row_terms[min(first_row + warp_row + r * 16 + half * 8 + tile::fragment_row(), rows_total - 1)];
  const auto q_blocks = tile::column_major_blocks<TileQ>(warp_row);
  const auto do_blocks = tile::column_major_blocks<TileDO>(warp_row);
  const auto k_rows_blocks = tile::row_major_blocks<TileK>(0);
  const auto v_rows_blocks = tile::row_major_blocks<TileV>(0);
  const auto k_columns_blocks = tile::column_major_blocks<TileK>(0);
  auto key_tile = [&](auto full, int step) {
    constexpr bool FULL = decltype(full)::value;
    const uint32_t thread = tile::thread_in_step(step), stage = q_tile + STAGES_OFFSET + (step & 1) * STAGE_BYTES;
    ptx::cp_async_wait<0>();
    bool finite = true;  // all of K is; else what a row does not see must not reach it
    if constexpr (FULL) {
      __syncthreads();  // the copies of all threads are visible, and nobody reads the other stage any more
    } else {
      const unsigned char *k_tile = shared_memory + STAGES_OFFSET + (step & 1) * STAGE_BYTES;
      finite = __syncthreads_or(tile::holds_infinite<Element, TileK, THREADS>(k_tile, thread)) == 0;
    }
    if (threadIdx.x == 0) walk.advance(step);
    if (step + 1 < walk.count) copy_keys(step + 1);
    ptx::cp_async_commit();

    float s[ROW_BLOCKS][KEY_OCTETS][4], dp[ROW_BLOCKS][KEY_OCTETS][4];
    tile::clear(s);
    tile::multiply_rows<Element>(s, q_blocks, q_tile, k_rows_blocks, stage);
    tile::clear(dp);
    tile::multiply_rows<Element>(dp, do_blocks, do_tile, v_rows_blocks, stage + TileK::BYTES);
    const int row = first_row + static_cast<int>(thread / 32 * (ROW_BLOCKS * 16) + thread % 32 / 4);
    score_gradients<FULL>(s, dp, rows, row, walk.tile(step) * TILE_N, item, places, args);
    uint32_t ds[TILE_N / 16][ROW_BLOCKS][4];
    tile::round_to_operand<Element>(ds, dp);
    if (!FULL && !finite)
      tile::drop_infinite_rows<Element, TileK, THREADS>(shared_memory + STAGES_OFFSET + (step & 1) * STAGE_BYTES);
    tile::multiply_columns<Element>(rows.dq, ds, k_columns_blocks, stage);
  };
#pragma unroll 1
  for (int step = 0; step < walk.partial; ++step) key_tile(tile::Constant<bool, false>(), step);
#pragma unroll 1
  for (int step = walk.partial; step < walk.count; ++step) key_tile(tile::Constant<bool, true>(), step);

  // ---- dQ
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < QK_OCTETS; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.dq[r][c][e] *= GRADIENT_SCALE;
  ptx::cp_async_wait<0>();
  __syncthreads();
  float *dq = reinterpret_cast<float *>(shared_memory);
  tile::store_floats<D_QK>(dq, PITCH, rows.dq, tile::warp_index(threadIdx.x) * (ROW_BLOCKS * 16), 0, 1);
  __syncthreads();
  const int batch = work_at_end.batch, head = work_at_end.head, first = work_at_end.tile * TILE_M;
  const int stored_rows = min(TILE_M, static_cast<int>(args.M) - first);
  tile::rotate_rows_back<QRotation0, THREADS>(dq, PITCH, QRotation0::table(args, batch, head, first), stored_rows);
  __syncthreads();
  tile::round_rows<Element, D_QK, THREADS>(dq, PITCH, tile::row_address(args.dq, batch, head, first),
                                           args.dq.stride[2] * 2, stored_rows);
}
