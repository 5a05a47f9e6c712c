// SPDX-License-Identifier: Apache-2.0
//
// Backward attention on Hopper, written by hand: three kernels.
//   backward_before  delta = rowsum(dO * O), LSE in log2 units, dQ sums zeroed
//   backward_main    one block per 128 keys; dK and dV in registers, dQ added to float32 sums in fragment order
//   backward_after   dQ sums -> bf16, times the softmax scale
// Tensors are (batch, head, row, D) bf16, contiguous. All query heads of a key head are done by the same block.
//
// One configuration per cubin:
//   HEAD_DIM 128 or 64; Q_ROWS queries per step (64, 80 at D128; 128 at D64); CAUSAL 0 or 1
//   PIPELINED 1: S of the next step and dQ of this one are under way while the softmax of the next step runs
//   DQ_MODE   0: red.v4 as soon as dQ is complete; 1: pipelined only, red.v4 while dP and dV run; 2: bulk reduction
//   DQ_SOON   1: pipelined only, dQ is issued before dK has completed
//   TERMS_EARLY 1: not pipelined, LSE and delta are read before the product they belong to is waited for
#include <stdint.h>

#include "ptx/backward_sm90.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/reduce.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

#include "backward_config.cuh"

namespace {

// ---- preprocess -----------------------------------------------------------------------------------------------------

constexpr int kLanesPerRow = kHeadDim / 8;

__device__ __forceinline__ float dot_bf16x2(uint32_t a, uint32_t b) {
  return __uint_as_float(a << 16) * __uint_as_float(b << 16) +
         __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
}

}  // namespace

// Grid: (row blocks, B * Hq). Rows from q_len on exist in the sums only: their LSE is +inf, so that P = 0.
extern "C" __global__ void __launch_bounds__(256) backward_before(const Arguments arguments) {
  const int row = blockIdx.x * (256 / kLanesPerRow) + threadIdx.x / kLanesPerRow;
  const int lane = threadIdx.x % kLanesPerRow;
  const int64_t head = blockIdx.y;
  if (row >= arguments.padded_rows) {
    return;
  }
  float4 *sums = reinterpret_cast<float4 *>(arguments.dq_sums + (head * arguments.padded_rows + row) * kHeadDim) + 2 * lane;
  sums[0] = make_float4(0, 0, 0, 0);
  sums[1] = make_float4(0, 0, 0, 0);
  float delta = 0;
  float lse = __int_as_float(0x7f800000);
  if (row < arguments.q_len) {
    const int64_t offset = ((head * arguments.q_len + row) * kHeadDim) / 8 + lane;
    const uint4 o = reinterpret_cast<const uint4 *>(arguments.o)[offset];
    const uint4 d_o = reinterpret_cast<const uint4 *>(arguments.d_o)[offset];
    delta = dot_bf16x2(o.x, d_o.x) + dot_bf16x2(o.y, d_o.y) + dot_bf16x2(o.z, d_o.z) + dot_bf16x2(o.w, d_o.w);
    const float natural = arguments.lse[head * arguments.q_len + row];
    lse = natural == -lse ? lse : natural * 1.4426950408889634f;
  }
#pragma unroll
  for (int step = kLanesPerRow / 2; step > 0; step /= 2) {
    delta += __shfl_xor_sync(0xffffffffu, delta, step);
  }
  if (lane == 0) {
    arguments.row_lse[head * arguments.padded_rows + row] = lse;
    arguments.row_delta[head * arguments.padded_rows + row] = delta;
  }
}

// ---- main -----------------------------------------------------------------------------------------------------------

namespace {

struct Work {
  int batch, key_head, key_start;
  int first, full, end;  // query tiles: [first, full) with a mask, [full, end) without
};

// Sections of key heads whose Q, dO and dQ sums fit in L2 together; in a section the longest key blocks first.
__device__ __forceinline__ Work find_work(const Arguments &a) {
  const int blocks = (a.k_len + kKeys - 1) / kKeys;
  const int heads = a.batches * a.k_heads;
  const int section = blockIdx.x / (a.section_heads * blocks);
  const int within = blockIdx.x - section * a.section_heads * blocks;
  const int section_heads = min(a.section_heads, heads - section * a.section_heads);
  const int head = section * a.section_heads + within % section_heads;
  Work work;
  work.batch = head / a.k_heads;
  work.key_head = head % a.k_heads;
  work.key_start = within / section_heads * kKeys;
  work.end = (a.q_len + kRows - 1) / kRows;
  work.first = 0;
  work.full = 0;
  if (kCausal) {
    work.first = max(0, work.key_start - a.offset) / kRows;
    work.full = (max(0, work.key_start + kKeys - 1 - a.offset) + kRows - 1) / kRows;
    work.full = min(work.end, max(work.full, work.first));
  }
  if (work.key_start + kKeys > a.k_len) {
    work.full = work.end;
  }
  return work;
}

__device__ void produce(const Arguments &a, const Work &work, uint32_t shared, const TensorMap &map_q, const TensorMap &map_k,
                        const TensorMap &map_v, const TensorMap &map_do) {
  ptx::mbarrier_arrive_expect(shared + kKFull, kKeys * kHeadDim * 2);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
    ptx::tma_load_4d(shared + kKAt + p * kKeyPanel, &map_k, shared + kKFull, p * 64, work.key_start, work.key_head, work.batch);
  }
  int item = 0;
  for (int g = 0; g < a.group; ++g) {
    const int head = work.key_head * a.group + g;
    const int64_t rows = (static_cast<int64_t>(work.batch) * a.k_heads * a.group + head) * a.padded_rows;
    for (int m = work.first; m < work.end; ++m, ++item) {
      const int stage = item & 1;
      const uint32_t parity = ((item >> 1) & 1) ^ 1;
      const uint32_t q_full = shared + kQFull + 8 * stage;
      ptx::mbarrier_wait(shared + kQEmpty + 8 * stage, parity);
      ptx::mbarrier_arrive_expect(q_full, kRowTile + kRows * 4);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load_4d(shared + kQAt + stage * kRowTile + p * kRowPanel, &map_q, q_full, p * 64, m * kRows, head, work.batch);
      }
      ptx::bulk_load(shared + kLseAt + stage * kRows * 4, a.row_lse + rows + m * kRows, kRows * 4, q_full);
      if (item == 0) {
        ptx::mbarrier_arrive_expect(shared + kVFull, kKeys * kHeadDim * 2);
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          ptx::tma_load_4d(shared + kVAt + p * kKeyPanel, &map_v, shared + kVFull, p * 64, work.key_start, work.key_head, work.batch);
        }
      }
      const uint32_t do_full = shared + kDoFull + 8 * stage;
      ptx::mbarrier_wait(shared + kDoEmpty + 8 * stage, parity);
      ptx::mbarrier_arrive_expect(do_full, kRowTile + kRows * 4);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load_4d(shared + kDoAt + stage * kRowTile + p * kRowPanel, &map_do, do_full, p * 64, m * kRows, head, work.batch);
      }
      ptx::bulk_load(shared + kDeltaAt + stage * kRows * 4, a.row_delta + rows + m * kRows, kRows * 4, do_full);
    }
  }
}

// Low word of a descriptor: panels of 64 columns, `panel` bytes apart (counts for transposed B only).
__device__ __forceinline__ uint32_t describe(uint32_t address, uint32_t panel) { return address >> 4 | panel >> 4 << 16; }

// With the high word: 128-byte swizzle, 1024 bytes between groups of 8 rows.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return low | static_cast<uint64_t>(1u << 30 | 1024 >> 4) << 32;
}

struct Consumer {
  uint32_t shared;
  int warpgroup, warp, lane;  // of the consumers, of the warpgroup, of the warp
  uint32_t k_rows, v_rows;    // own 64 keys, reduction over D
  uint32_t q, d_o;            // stage 0
  uint32_t dq_a, dq_b;        // operands of dQ, dS stage 0
  uint32_t ds_store;          // this lane's row of the stmatrix of dS, stage 0
  uint32_t columns;           // byte offset of this lane's first column in the row terms
  float scale_log2;
  int threshold[2];           // the key is visible to queries from here on
};

using Scores = float[kRows / 2];
using Packed = uint32_t[kRows / 4];
using RowTerms = float2[kRows / 8];
using KeyGradient = float[kHeadDim / 2];
using QueryGradient = float[kDqCount];

// S^T or dP^T: own 64 keys x kRows.
__device__ __forceinline__ void issue_scores(Scores &s, uint32_t keys, uint32_t rows) {
  ptx::wgmma_hold(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const int a = (k / 4) * (kKeyPanel >> 4) + (k % 4) * 2;
    const int b = (k / 4) * (kRowPanel >> 4) + (k % 4) * 2;
    ptx::Wgmma<kRows>::ss_bf16<0, 0>(s, descriptor(keys + a), descriptor(rows + b), k != 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_hold(s);
}

// dV or dK: own 64 keys x D, weights from registers.
__device__ __forceinline__ void issue_key_gradient(KeyGradient &d, Packed &weights, uint32_t rows) {
  ptx::wgmma_hold(d);
  ptx::wgmma_hold(weights);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    ptx::Wgmma<kHeadDim>::rs_bf16<1>(d, weights + 4 * k, descriptor(rows + k * 128), 1);
  }
  ptx::wgmma_commit();
  ptx::wgmma_hold(d);
  ptx::wgmma_hold(weights);
}

__device__ __forceinline__ void issue_dq(QueryGradient &dq, uint32_t a, uint32_t b) {
  ptx::wgmma_hold(dq);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    ptx::Wgmma<kDqColumns>::ss_bf16<1, 1>(dq, descriptor(a + k * 128), descriptor(b + k * 128), k != 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_hold(dq);
}

// This lane's columns of LSE or delta (`at` is the offset of stage 0).
__device__ __forceinline__ void load_row_terms(const Consumer &c, RowTerms &terms, uint32_t at, int stage) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    terms[j] = ptx::load_shared_x2(c.shared + at + stage * kRows * 4 + c.columns + 32 * j);
  }
}

// P^T = 2^(S^T c - LSE): the query is the column.
template <bool MASKED>
__device__ __forceinline__ void weigh(const Consumer &c, Scores &s, const RowTerms &lse, int m) {
  const int base = m * kRows + 2 * (c.lane & 3);
  const int low = c.threshold[0] - base;
  const int high = c.threshold[1] - base;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const float2 l = lse[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = fmaf(s[4 * j + i], c.scale_log2, i & 1 ? -l.y : -l.x);
      if (MASKED) {
        x = 8 * j + (i & 1) >= (i & 2 ? high : low) ? x : -__int_as_float(0x7f800000);
      }
      s[4 * j + i] = ptx::exp2_approx(x);
    }
  }
}

__device__ __forceinline__ void pack(Packed &packed, const Scores &s) {
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    packed[i] = ptx::pack_bf16(s[2 * i], s[2 * i + 1]);
  }
}

// dS^T = P^T (dP^T - delta), into dp.
__device__ __forceinline__ void differentiate(Scores &dp, const Scores &p, const Packed &packed, const RowTerms &delta) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const float2 d = delta[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = packed[2 * j + i / 2];
      const float weight = !kPipelined ? p[4 * j + i] : __uint_as_float(i & 1 ? pair & 0xffff0000u : pair << 16);
      dp[4 * j + i] = weight * (dp[4 * j + i] - (i & 1 ? d.y : d.x));
    }
  }
}

__device__ __forceinline__ void store_ds(const Consumer &c, const Packed &ds, int item) {
  const uint32_t base = c.ds_store + (item & 1) % kDsStages * kDsTile;
#pragma unroll
  for (int t = 0; t < kRows / 16; ++t) {
    // The chunk inside the panel is (2t) % 8 + (lane / 16); the address of t = 0 holds the rest, xor of the row included.
    ptx::stmatrix_x4((base + t / 4 * kKeyPanel) ^ ((2 * t % 8) << 4), ds + 4 * t);
  }
  ptx::proxy_fence_shared();
  __syncwarp();
  if (c.lane == 0) {
    ptx::mbarrier_arrive(c.shared + kDsFull + 8 * ((item & 1) % kDsStages));
  }
}

__device__ __forceinline__ void release(const Consumer &c, uint32_t barrier, int stage) {
  __syncwarp();
  if (c.lane == 0) {
    ptx::mbarrier_arrive(c.shared + barrier + 8 * stage);
  }
}

// `sums` is this lane's place in the tile: its warp's chunk holds [registers / 4][32 lanes][4].
__device__ __forceinline__ void add_dq(const Consumer &c, const QueryGradient &dq, float *sums) {
  if (kDqMode == kBulk) {
    const uint32_t chunk = c.shared + kDqAt + (c.warpgroup * 4 + c.warp) * kDqCount * 128;
    if (c.lane == 0) {
      ptx::bulk_wait_read<0>();
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kDqCount / 4; ++j) {
      ptx::store_shared_x4(chunk + j * 512 + c.lane * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
    ptx::proxy_fence_shared();
    __syncwarp();
    if (c.lane == 0) {
      ptx::bulk_add_f32(sums, chunk, kDqCount * 128);
      ptx::bulk_commit();
    }
  } else {
#pragma unroll
    for (int j = 0; j < kDqCount / 4; ++j) {
      const float part[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      ptx::red_add_x4(sums + 128 * j, part);
    }
  }
}

struct Registers {
  KeyGradient dk, dv;
  Scores s, dp;
  Packed p, ds;
  QueryGradient dq;
};

// S of `item` is there: its P, in r.s (float32) and r.p (bf16).
template <bool MASKED>
__device__ __forceinline__ void weigh_and_pack(const Consumer &c, Registers &r, int item, int m) {
  RowTerms lse;
  load_row_terms(c, lse, kLseAt, item & 1);
  weigh<MASKED>(c, r.s, lse, m);
  pack(r.p, r.s);
}

// From P of `item` to P of the next (whose query tile is `next_m`); nothing under way on entry and exit. dQ of the item
// is added before the end, or (kRedLate) in the next step: `before` is the place of the item before, `here` of this.
template <bool MASKED, bool LAST>
__device__ __forceinline__ void pipelined_step(const Consumer &c, Registers &r, int item, int next_m, float *before, float *here) {
  const int stage = item & 1;
  const uint32_t parity = (item >> 1) & 1;
  const uint32_t stage_rows = stage * (kRowTile >> 4);
  ptx::mbarrier_wait(c.shared + kDoFull + 8 * stage, parity);
  issue_scores(r.dp, c.v_rows, c.d_o + stage_rows);
  issue_key_gradient(r.dv, r.p, c.d_o + stage_rows);
  if (kDqMode == kRedLate && item > 0) {
    add_dq(c, r.dq, before);
  }
  ptx::wgmma_wait<1>();  // dP
  ptx::wgmma_hold(r.dp);
  RowTerms delta;
  load_row_terms(c, delta, kDeltaAt, stage);
  differentiate(r.dp, r.s, r.p, delta);
  pack(r.ds, r.dp);
  store_ds(c, r.ds, item);
  issue_key_gradient(r.dk, r.ds, c.q + stage_rows);
  ptx::wgmma_wait<1>();  // dV
  ptx::wgmma_hold(r.dv);
  ptx::wgmma_hold(r.p);
  release(c, kDoEmpty, stage);
  if (!LAST) {
    ptx::mbarrier_wait(c.shared + kQFull + 8 * (stage ^ 1), ((item + 1) >> 1) & 1);
    issue_scores(r.s, c.k_rows, c.q + (stage ^ 1) * (kRowTile >> 4));
  }
  ptx::mbarrier_wait(c.shared + kDsFull + 8 * stage, parity);
  const uint32_t ds_stage = stage * (kDsTile >> 4);
  if (!kDqSoon) {
    ptx::wgmma_wait<LAST ? 0 : 1>();  // dK: its registers of dS are free for dQ
    ptx::wgmma_hold(r.dk);
    ptx::wgmma_hold(r.ds);
  }
  issue_dq(r.dq, c.dq_a + (kDqSwapped ? 0 : ds_stage), c.dq_b + (kDqSwapped ? ds_stage : 0));
  if (kDqSoon) {
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(r.dk);
    ptx::wgmma_hold(r.ds);
  }
  if (!LAST) {
    release(c, kQEmpty, stage);
    if (!kDqSoon) {
      ptx::wgmma_wait<1>();  // S
    }
    ptx::wgmma_hold(r.s);
    weigh_and_pack<MASKED>(c, r, item + 1, next_m);
  }
  ptx::wgmma_wait<0>();  // dQ
  ptx::wgmma_hold(r.dq);
  if (kDqMode != kRedLate || LAST) {
    add_dq(c, r.dq, here);
  }
}

// Everything of one item, nothing under way on entry and exit.
template <bool MASKED>
__device__ __forceinline__ void plain_step(const Consumer &c, Registers &r, int item, int m, float *sums) {
  const int stage = item & 1;
  const uint32_t parity = (item >> 1) & 1;
  const uint32_t stage_rows = stage * (kRowTile >> 4);
  ptx::mbarrier_wait(c.shared + kQFull + 8 * stage, parity);
  issue_scores(r.s, c.k_rows, c.q + stage_rows);
  ptx::mbarrier_wait(c.shared + kDoFull + 8 * stage, parity);
  issue_scores(r.dp, c.v_rows, c.d_o + stage_rows);
  RowTerms lse, delta;
  if (kTermsEarly) {
    load_row_terms(c, lse, kLseAt, stage);
  }
  ptx::wgmma_wait<1>();
  ptx::wgmma_hold(r.s);
  if (!kTermsEarly) {
    load_row_terms(c, lse, kLseAt, stage);
  }
  weigh<MASKED>(c, r.s, lse, m);
  pack(r.p, r.s);
  if (kTermsEarly) {
    load_row_terms(c, delta, kDeltaAt, stage);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_hold(r.dp);
  if (!kTermsEarly) {
    load_row_terms(c, delta, kDeltaAt, stage);
  }
  differentiate(r.dp, r.s, r.p, delta);
  pack(r.ds, r.dp);
  if (kDsStages == 1) {
    ptx::barrier_sync<1, 256>();  // both warpgroups are done with dS of the item before
  }
  store_ds(c, r.ds, item);
  issue_key_gradient(r.dv, r.p, c.d_o + stage_rows);
  const int ds_at = stage % kDsStages;
  ptx::mbarrier_wait(c.shared + kDsFull + 8 * ds_at, kDsStages == 2 ? parity : item & 1);
  const uint32_t ds_stage = ds_at * (kDsTile >> 4);
  issue_dq(r.dq, c.dq_a + (kDqSwapped ? 0 : ds_stage), c.dq_b + (kDqSwapped ? ds_stage : 0));
  ptx::wgmma_wait<1>();
  ptx::wgmma_hold(r.dv);
  ptx::wgmma_hold(r.p);
  release(c, kDoEmpty, stage);
  issue_key_gradient(r.dk, r.ds, c.q + stage_rows);
  ptx::wgmma_wait<1>();
  ptx::wgmma_hold(r.dq);
  add_dq(c, r.dq, sums);
  ptx::wgmma_wait<0>();
  ptx::wgmma_hold(r.dk);
  ptx::wgmma_hold(r.ds);
  release(c, kQEmpty, stage);
}

// 64 keys x D to the shared tile at `tile` (the warpgroup's own 64 rows), then to global memory by TMA.
__device__ __forceinline__ void store_key_gradient(const Consumer &c, const KeyGradient &d, float scale, uint32_t tile,
                                                   const TensorMap &map, const Work &work) {
  const int row = 64 * c.warpgroup + 16 * c.warp + (c.lane & 15);
#pragma unroll
  for (int t = 0; t < kHeadDim / 16; ++t) {
    uint32_t part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      part[i] = ptx::pack_bf16(d[8 * t + 2 * i] * scale, d[8 * t + 2 * i + 1] * scale);
    }
    const int chunk = 2 * t % 8 + (c.lane >> 4);
    ptx::stmatrix_x4(tile + t / 4 * kKeyPanel + row * 128 + ((chunk ^ (row & 7)) << 4), part);
  }
  ptx::proxy_fence_shared();
  if (c.warpgroup == 0) {
    ptx::barrier_sync<2, 128>();
  } else {
    ptx::barrier_sync<3, 128>();
  }
  if (c.warp == 0 && c.lane == 0) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_store_4d(&map, tile + p * kKeyPanel + c.warpgroup * 8192, p * 64, work.key_start + 64 * c.warpgroup,
                        work.key_head, work.batch);
    }
    ptx::bulk_commit();
  }
}

__device__ __forceinline__ void consume(const Arguments &a, const Work &work, uint32_t shared, const TensorMap &map_dk,
                                        const TensorMap &map_dv) {
  Consumer c;
  c.shared = shared;
  c.warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
  c.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) & 3;
  c.lane = threadIdx.x & 31;
  c.k_rows = describe(shared + kKAt + c.warpgroup * 8192, kKeyPanel);
  c.v_rows = describe(shared + kVAt + c.warpgroup * 8192, kKeyPanel);
  c.q = describe(shared + kQAt, kRowPanel);
  c.d_o = describe(shared + kDoAt, kRowPanel);
  const uint32_t k_half = shared + kKAt + (kHeadDim == 128 ? c.warpgroup * kKeyPanel : 0);
  const uint32_t ds_half = shared + kDsAt + (kRows == 128 ? c.warpgroup * kKeyPanel : 0);
  c.dq_a = describe(kDqSwapped ? k_half : ds_half, kKeyPanel);
  c.dq_b = describe(kDqSwapped ? ds_half : k_half, kKeyPanel);
  const int ds_row = 64 * c.warpgroup + 16 * c.warp + (c.lane & 15);
  c.ds_store = shared + kDsAt + ds_row * 128 + (((c.lane >> 4) ^ (ds_row & 7)) << 4);
  c.columns = 8 * (c.lane & 3);
  c.scale_log2 = a.scale * 1.4426950408889634f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = work.key_start + 64 * c.warpgroup + 16 * c.warp + (c.lane >> 2) + 8 * i;
    c.threshold[i] = key >= a.k_len ? 0x3fffffff : kCausal ? key - a.offset : -0x3fffffff;
  }

  Registers r;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) {
    r.dk[i] = 0;
    r.dv[i] = 0;
  }
  const int lane_at = (c.warpgroup * 4 + c.warp) * kDqCount * 32 + (kDqMode == kBulk ? 0 : c.lane * 4);
  const int64_t head_sums = static_cast<int64_t>(a.padded_rows) * kHeadDim;
  float *sums = a.dq_sums + (static_cast<int64_t>(work.batch) * a.k_heads + work.key_head) * a.group * head_sums +
                static_cast<int64_t>(work.first) * kRows * kHeadDim + lane_at;
  ptx::mbarrier_wait(shared + kKFull, 0);
  const bool empty = work.first >= work.end;  // no query sees these keys: V and Q never come, dK and dV are zero
  if (empty) {
    // nothing to wait for
  } else if (kPipelined) {
    ptx::mbarrier_wait(shared + kQFull, 0);
    issue_scores(r.s, c.k_rows, c.q);
    ptx::mbarrier_wait(shared + kVFull, 0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(r.s);
    weigh_and_pack<true>(c, r, 0, work.first);
    float *before = sums;
    float *here = sums;
    int item = 0;
    for (int g = 0; g < a.group; ++g) {
      float *next = sums + g * head_sums;
      int m = work.first;
      if (g == 0) {
        next += kRows * kHeadDim;
        ++m;
      }
#pragma unroll 1
      for (; m < work.full; ++m, ++item) {
        pipelined_step<true, false>(c, r, item, m, before, here);
        before = here;
        here = next;
        next += kRows * kHeadDim;
      }
#pragma unroll 1
      for (; m < work.end; ++m, ++item) {
        pipelined_step<false, false>(c, r, item, m, before, here);
        before = here;
        here = next;
        next += kRows * kHeadDim;
      }
    }
    pipelined_step<false, true>(c, r, item, 0, before, here);
  } else {
    ptx::mbarrier_wait(shared + kVFull, 0);
    int item = 0;
    for (int g = 0; g < a.group; ++g) {
      float *here = sums + g * head_sums;
#pragma unroll 1
      for (int m = work.first; m < work.full; ++m, ++item) {
        plain_step<true>(c, r, item, m, here);
        here += kRows * kHeadDim;
      }
#pragma unroll 1
      for (int m = work.full; m < work.end; ++m, ++item) {
        plain_step<false>(c, r, item, m, here);
        here += kRows * kHeadDim;
      }
    }
  }

  store_key_gradient(c, r.dv, 1.0f, shared + kVAt, map_dv, work);
  ptx::barrier_sync<1, 256>();  // K is an operand of dQ in both warpgroups
  store_key_gradient(c, r.dk, a.scale, shared + kKAt, map_dk, work);
  if (c.lane == 0) {
    ptx::bulk_wait_read<0>();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1)
backward_main(const __grid_constant__ Arguments arguments, const __grid_constant__ TensorMap map_q,
              const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
              const __grid_constant__ TensorMap map_do, const __grid_constant__ TensorMap map_dk,
              const __grid_constant__ TensorMap map_dv) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 0 && ptx::elect_one()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared + kQFull + 8 * i, 1);
      ptx::mbarrier_init(shared + kDoFull + 8 * i, 1);
      ptx::mbarrier_init(shared + kQEmpty + 8 * i, 8);
      ptx::mbarrier_init(shared + kDoEmpty + 8 * i, 8);
      ptx::mbarrier_init(shared + kDsFull + 8 * i, 8);
    }
    ptx::mbarrier_init(shared + kKFull, 1);
    ptx::mbarrier_init(shared + kVFull, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const Work work = find_work(arguments);
  if (warp < 4) {
    ptx::registers_decrease<24>();
    if (warp == 0 && ptx::elect_one()) {
      produce(arguments, work, shared, map_q, map_k, map_v, map_do);
    }
  } else {
    ptx::registers_increase<240>();
    consume(arguments, work, shared, map_dk, map_dv);
  }
}

// ---- postprocess ----------------------------------------------------------------------------------------------------

// Grid: (query tiles, B * Hq). The tile lies as the accumulators of backward_main did.
extern "C" __global__ void __launch_bounds__(256) backward_after(const Arguments arguments) {
  constexpr int kPitch = kHeadDim + 8;
  __shared__ __align__(16) uint16_t tile[kRows * kPitch];
  const int64_t head = blockIdx.y;
  const int first = blockIdx.x * kRows;
  const float4 *sums =
      reinterpret_cast<const float4 *>(arguments.dq_sums + (head * arguments.padded_rows + first) * kHeadDim);
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int row = 16 * warp + lane / 4 + (kRows == 128 ? 64 * warpgroup : 0) + (kDqSwapped ? 64 * warpgroup : 0);
  const int half = kHeadDim == 128 && !kDqSwapped ? 64 * warpgroup : 0;
  float4 part[kDqCount / 4];
#pragma unroll
  for (int j = 0; j < kDqCount / 4; ++j) {
    part[j] = sums[(threadIdx.x / 32) * kDqCount * 8 + j * 32 + lane];
  }
#pragma unroll
  for (int j = 0; j < kDqCount / 4; ++j) {
    const int column = half + 8 * j + 2 * (lane % 4);
    const uint32_t low = ptx::pack_bf16(part[j].x * arguments.scale, part[j].y * arguments.scale);
    const uint32_t high = ptx::pack_bf16(part[j].z * arguments.scale, part[j].w * arguments.scale);
    if (kDqSwapped) {  // row counts D, column counts queries
      tile[column * kPitch + row] = static_cast<uint16_t>(low);
      tile[(column + 1) * kPitch + row] = static_cast<uint16_t>(low >> 16);
      tile[column * kPitch + row + 8] = static_cast<uint16_t>(high);
      tile[(column + 1) * kPitch + row + 8] = static_cast<uint16_t>(high >> 16);
    } else {
      *reinterpret_cast<uint32_t *>(&tile[row * kPitch + column]) = low;
      *reinterpret_cast<uint32_t *>(&tile[(row + 8) * kPitch + column]) = high;
    }
  }
  __syncthreads();
  uint4 *dq = reinterpret_cast<uint4 *>(arguments.dq) + head * arguments.q_len * (kHeadDim / 8);
  for (int i = threadIdx.x; i < kRows * (kHeadDim / 8); i += 256) {
    const int r = i / (kHeadDim / 8);
    const int chunk = i % (kHeadDim / 8);
    if (first + r < arguments.q_len) {
      dq[static_cast<int64_t>(first + r) * (kHeadDim / 8) + chunk] = *reinterpret_cast<const uint4 *>(&tile[r * kPitch + 8 * chunk]);
    }
  }
}
