// SPDX-License-Identifier: Apache-2.0
//
// Hopper forward attention, hand-written: softmax(scale q k^T) v in bf16, full or causal (bottom-right aligned), with
// row log-sum-exp. One producer warpgroup feeds K and V by TMA to CONSUMERS warpgroups of 64 query rows each. Every
// stage of the design can be switched off, so that its gain is measured.
#include <stddef.h>
#include <stdint.h>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "tile/sm90/descriptor.cuh"
#include "tile/sm90/pipeline.cuh"
#include "tile/sm90/rotary.cuh"
#include "tile/sm90/scores.cuh"
#include "tile/sm90/softmax.cuh"
#include "tile/sm90/store.cuh"

// ---- Configuration ---------------------------------------------------------------------------------------------

constexpr int HEAD_DIM = AFC_HEAD_DIM;
constexpr int CONSUMERS = AFC_CONSUMERS;
constexpr int TILE_M = 64 * CONSUMERS;
constexpr int TILE_N = AFC_TILE_N;
constexpr int STAGES = AFC_STAGES;
constexpr bool CAUSAL = AFC_CAUSAL != 0;
constexpr bool OVERLAP = AFC_OVERLAP != 0;      // the scores of the next step are issued before this step's P V
constexpr bool PING_PONG = AFC_PING_PONG != 0;  // warpgroups issue their products in turn
constexpr bool PEEL = AFC_PEEL != 0;            // mask only the steps that need it

enum Maximum { EXACT = 0, STALE = 1, WATCHED = 2 };
constexpr Maximum MAXIMUM = static_cast<Maximum>(AFC_MAXIMUM);  // what the exponentials of a free step refer to
constexpr bool ROTATE = AFC_ROTATE != 0;        // rotary embedding of q here; k was rotated by rotate_keys

// What is added to a score, slope(head) times the column here: nothing; by arithmetic on each score; or as 16 more
// columns of the product of queries and keys, whatever they hold.
enum Term { NONE = 0, PER_SCORE = 1, COLUMNS = 2 };
constexpr Term TERM = static_cast<Term>(AFC_TERM);

enum Schedule { GRID_ORDER = 0, GRID_LONGEST_FIRST = 1, PERSISTENT = 2 };
constexpr Schedule SCHEDULE = static_cast<Schedule>(AFC_SCHEDULE);

constexpr int WARPGROUP = 128;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
constexpr int WORK_SLOTS = 2;
constexpr float LN_2 = 0.6931471805599453f;

using QueryTile = tile::Panels<TILE_M, HEAD_DIM>;
using KeyTile = tile::Panels<TILE_N, HEAD_DIM>;
constexpr int PANELS = HEAD_DIM / tile::PANEL_COLUMNS;

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct ForwardParameters {
  uint16_t *out;
  float *lse;         // [batch][head][row]
  uint32_t *counter;  // two zeros; zero again afterwards
  int64_t out_batch, out_row, out_head;  // strides in elements
  int rows, columns;
  int heads, group;  // query heads; query heads to a key head
  int batches;
  int row_tiles, work_items;
  int section;  // heads whose K and V share the L2
  float factor;  // scale * log2(e)
  const float2 *turns;  // (cos, sin) [position][HEAD_DIM / 2]; the last query row is at the last key's position
  const float *slope;   // [head], in units of unscaled scores
};

// ---- Shared memory ---------------------------------------------------------------------------------------------

constexpr uint32_t QUERY_AT = 0;
constexpr uint32_t KEY_AT = QUERY_AT + QueryTile::BYTES;
constexpr uint32_t VALUE_AT = KEY_AT + STAGES * KeyTile::BYTES;
constexpr uint32_t NARROW_QUERY_BYTES = TERM == COLUMNS ? TILE_M * tile::NARROW_ROW_BYTES : 0;
constexpr uint32_t NARROW_KEY_BYTES = TERM == COLUMNS ? TILE_N * tile::NARROW_ROW_BYTES : 0;
constexpr uint32_t NARROW_QUERY_AT = VALUE_AT + STAGES * KeyTile::BYTES;
constexpr uint32_t NARROW_KEY_AT = NARROW_QUERY_AT + NARROW_QUERY_BYTES;
constexpr uint32_t BARRIERS_AT = NARROW_KEY_AT + STAGES * NARROW_KEY_BYTES;

struct Barriers {
  uint64_t query_full, query_empty;
  uint64_t key_full[STAGES], key_empty[STAGES];
  uint64_t value_full[STAGES], value_empty[STAGES];
  uint64_t work_full[WORK_SLOTS], work_empty[WORK_SLOTS];
  int work[WORK_SLOTS];
};

#define AFC_BARRIER(name) (base + BARRIERS_AT + static_cast<uint32_t>(offsetof(Barriers, name)))

// ---- Work ------------------------------------------------------------------------------------------------------

struct WorkItem {
  int row_tile, head, batch;
  int steps;       // key tiles, last first
  int free_steps;  // of these, the last ones, where no row has a masked column and each has had a live one
};

__device__ __forceinline__ WorkItem work_item(const ForwardParameters &p, int index) {
  WorkItem item;
  int batch_head;
  if constexpr (SCHEDULE == GRID_ORDER) {
    item.row_tile = index % p.row_tiles;
    batch_head = index / p.row_tiles;
  } else {
    const int section_items = p.section * p.row_tiles;
    const int first = index / section_items * p.section;
    const int within = index % section_items;
    const int heads = min(p.section, p.heads * p.batches - first);
    item.row_tile = p.row_tiles - 1 - within / heads;
    batch_head = first + within % heads;
  }
  item.head = batch_head % p.heads;
  item.batch = batch_head / p.heads;
  const int offset = p.columns - p.rows;
  const int first_row_limit = CAUSAL ? item.row_tile * TILE_M + offset : p.columns - 1;
  const int end = CAUSAL ? min(p.columns, first_row_limit + TILE_M) : p.columns;
  item.steps = (max(end, 0) + TILE_N - 1) / TILE_N;
  item.free_steps = PEEL ? max(first_row_limit, 0) / TILE_N : 0;
  return item;
}

// ---- Producer --------------------------------------------------------------------------------------------------

template <int ROWS>
__device__ __forceinline__ void load_tile(uint32_t destination, const void *map, uint32_t barrier, int row, int head,
                                          int batch) {
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    ptx::tma_load_4d(destination + panel * tile::Panels<ROWS, HEAD_DIM>::PANEL_BYTES, map, barrier,
                     panel * tile::PANEL_COLUMNS, row, head, batch);
  }
}

struct Ring {
  uint32_t tiles, full, empty;
  uint32_t narrow_tiles;  // of the keys, if a term rides in more columns
  tile::RingPlace<STAGES> place;

  __device__ __forceinline__ void load(const void *map, int row, int head, int batch) {
    ptx::mbarrier_wait(empty + 8 * place.stage, place.phase ^ 1);
    ptx::mbarrier_arrive_expect(full + 8 * place.stage, KeyTile::BYTES);
    load_tile<TILE_N>(tiles + place.stage * KeyTile::BYTES, map, full + 8 * place.stage, row, head, batch);
    place.advance();
  }

  __device__ __forceinline__ void load(const void *map, const void *narrow_map, int row, int head, int batch) {
    if constexpr (TERM == COLUMNS) {
      ptx::mbarrier_wait(empty + 8 * place.stage, place.phase ^ 1);
      ptx::mbarrier_expect(full + 8 * place.stage, NARROW_KEY_BYTES);
      ptx::tma_load_4d(narrow_tiles + place.stage * NARROW_KEY_BYTES, narrow_map, full + 8 * place.stage, 0, row, head,
                       batch);
    }
    load(map, row, head, batch);
  }
};

struct Maps {
  const void *query, *key, *value, *narrow_query, *narrow_key;
};

__device__ __forceinline__ void load_query(const Maps &maps, uint32_t base, const WorkItem &item) {
  const uint32_t barrier = AFC_BARRIER(query_full);
  ptx::mbarrier_arrive_expect(barrier, QueryTile::BYTES + NARROW_QUERY_BYTES);
  load_tile<TILE_M>(base + QUERY_AT, maps.query, barrier, item.row_tile * TILE_M, item.head, item.batch);
  if constexpr (TERM == COLUMNS) {
    ptx::tma_load_4d(base + NARROW_QUERY_AT, maps.narrow_query, barrier, 0, item.row_tile * TILE_M, item.head,
                     item.batch);
  }
}

// The next work item. Drawn one step before the end of the current one: earlier, and a block sits on an item that an
// idle block could do; later, and the answer is waited for.
__device__ __forceinline__ int draw_ticket(const ForwardParameters &p) {
  if constexpr (SCHEDULE == PERSISTENT) {
    return static_cast<int>(atomicAdd(p.counter, 1u) + gridDim.x);
  } else {
    return p.work_items;
  }
}

__device__ __forceinline__ void produce(const ForwardParameters &p, uint32_t base, const Maps &maps) {
  Ring keys{base + KEY_AT, AFC_BARRIER(key_full), AFC_BARRIER(key_empty), base + NARROW_KEY_AT, {}};
  Ring values{base + VALUE_AT, AFC_BARRIER(value_full), AFC_BARRIER(value_empty), 0, {}};
  tile::RingPlace<WORK_SLOTS> work;
  uint32_t query_phase = 0;
  int index = static_cast<int>(blockIdx.x);
  while (index < p.work_items) {
    int next = p.work_items;
    const WorkItem item = work_item(p, index);
    const int key_head = item.head / p.group;
    if (item.steps > 0) {
      keys.load(maps.key, maps.narrow_key, (item.steps - 1) * TILE_N, key_head, item.batch);
      ptx::mbarrier_wait(AFC_BARRIER(query_empty), query_phase ^ 1);
      load_query(maps, base, item);
      query_phase ^= 1;
      for (int n = item.steps - 1; n > 0; --n) {
        keys.load(maps.key, maps.narrow_key, (n - 1) * TILE_N, key_head, item.batch);
        if (n == 1) {
          next = draw_ticket(p);
        }
        values.load(maps.value, n * TILE_N, key_head, item.batch);
      }
      values.load(maps.value, 0, key_head, item.batch);
    }
    if (item.steps <= 1) {
      next = draw_ticket(p);
    }
    if constexpr (SCHEDULE == PERSISTENT) {
      ptx::mbarrier_wait(AFC_BARRIER(work_empty) + 8 * work.stage, work.phase ^ 1);
      asm volatile("st.shared.s32 [%0], %1;" : : "r"(AFC_BARRIER(work) + 4 * work.stage), "r"(next) : "memory");
      ptx::mbarrier_arrive(AFC_BARRIER(work_full) + 8 * work.stage);
      work.advance();
    }
    index = next;
  }
  if constexpr (SCHEDULE == PERSISTENT) {
    // The block that ends last has seen all tickets drawn, and leaves the counters as they were.
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) {
      p.counter[0] = 0;
      p.counter[1] = 0;
    }
  }
}

// ---- Consumers -------------------------------------------------------------------------------------------------

using Scores = float[TILE_N / 2];
using Probabilities = uint32_t[TILE_N / 4];
using Output = float[HEAD_DIM / 2];

__device__ __forceinline__ void issue_scores(Scores &score, uint32_t query, uint32_t key, uint32_t narrow_query,
                                             uint32_t narrow_key) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    ptx::Wgmma<TILE_N>::ss_bf16<0, 0>(score,
                                      tile::descriptor(query + tile::along_columns<QueryTile::PANEL_BYTES>(k)),
                                      tile::descriptor(key + tile::along_columns<KeyTile::PANEL_BYTES>(k)), k > 0);
  }
  if constexpr (TERM == COLUMNS) {
    ptx::Wgmma<TILE_N>::ss_bf16<0, 0>(score, tile::narrow_descriptor(narrow_query),
                                      tile::narrow_descriptor(narrow_key), 1);
  }
  ptx::wgmma_commit();
}

__device__ __forceinline__ void issue_output(Output &output, const Probabilities &probability, uint32_t value) {
#pragma unroll
  for (int k = 0; k < TILE_N / 16; ++k) {
    ptx::Wgmma<HEAD_DIM>::rs_bf16<1>(output, probability + 4 * k, tile::descriptor(value + tile::along_rows(k)), 1);
  }
  ptx::wgmma_commit();
}

template <int WARPGROUPS>
__device__ __forceinline__ void wait_turn(int group) {
  if (group == 0) {
    ptx::barrier_sync<1, 2 * WARPGROUP>();
  } else if (WARPGROUPS == 2 || group == 1) {
    ptx::barrier_sync<2, 2 * WARPGROUP>();
  } else {
    ptx::barrier_sync<3, 2 * WARPGROUP>();
  }
}

template <int WARPGROUPS>
__device__ __forceinline__ void pass_turn(int group) {
  if (group == WARPGROUPS - 1) {
    ptx::barrier_arrive<1, 2 * WARPGROUP>();
  } else if (group == 0) {
    ptx::barrier_arrive<2, 2 * WARPGROUP>();
  } else {
    ptx::barrier_arrive<3, 2 * WARPGROUP>();
  }
}

__device__ __forceinline__ void release(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive(barrier);
  }
}

struct Consumer {
  const ForwardParameters &p;
  uint32_t base;
  int group;  // warpgroup among the consumers
  uint32_t query_low, key_low, value_low, narrow_query_low, narrow_key_low;
  tile::RingPlace<STAGES> key, value;
  uint32_t query_phase = 0;

  __device__ __forceinline__ uint32_t key_stage() const {
    return key_low + key.stage * static_cast<uint32_t>(KeyTile::BYTES >> 4);
  }
  __device__ __forceinline__ uint32_t narrow_key_stage() const {
    return narrow_key_low + key.stage * (NARROW_KEY_BYTES >> 4);
  }
  __device__ __forceinline__ uint32_t value_stage() const {
    return value_low + value.stage * static_cast<uint32_t>(KeyTile::BYTES >> 4);
  }
  __device__ __forceinline__ void wait_key() { ptx::mbarrier_wait(AFC_BARRIER(key_full) + 8 * key.stage, key.phase); }
  __device__ __forceinline__ void wait_value() {
    ptx::mbarrier_wait(AFC_BARRIER(value_full) + 8 * value.stage, value.phase);
  }
  __device__ __forceinline__ void release_key() {
    release(AFC_BARRIER(key_empty) + 8 * key.stage);
    key.advance();
  }
  __device__ __forceinline__ void release_value() {
    release(AFC_BARRIER(value_empty) + 8 * value.stage);
    value.advance();
  }

  __device__ __forceinline__ void mask(Scores &score, const WorkItem &item, int n) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % 4);
    const int row = item.row_tile * TILE_M + group * 64 + warp * 16 + lane / 4;
    const int start = n * TILE_N + lane % 4 * 2;
    const int diagonal = row + p.columns - p.rows + 1;
    const int limit[2] = {(CAUSAL ? min(diagonal, p.columns) : p.columns) - start,
                          (CAUSAL ? min(diagonal + 8, p.columns) : p.columns) - start};
    tile::mask_from(score, limit);
  }

  __device__ __forceinline__ void add_term(Scores &score, const WorkItem &item, int n) {
    if constexpr (TERM == PER_SCORE) {
      const float slope = __ldg(p.slope + item.head);
      const float start = static_cast<float>(n * TILE_N + static_cast<int>(threadIdx.x % 4) * 2);
#pragma unroll
      for (int i = 0; i < TILE_N / 2; ++i) {
        score[i] = fmaf(slope, start + static_cast<float>(i / 4 * 8 + i % 2), score[i]);
      }
    }
  }

  // In shared memory, each warp its 16 rows; the product reads the rows of all four.
  __device__ __forceinline__ void rotate_query(const WorkItem &item) {
    if constexpr (ROTATE) {
      const int first = group * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
      const int row = item.row_tile * TILE_M + first;
      tile::rotate_rows<TILE_M, HEAD_DIM>(base + QUERY_AT + first * 128, p.turns, row + p.columns - p.rows,
                                          p.rows - row);
      ptx::proxy_fence_shared();
      if (group == 0) {
        ptx::barrier_sync<4, WARPGROUP>();
      } else if (group == 1) {
        ptx::barrier_sync<5, WARPGROUP>();
      } else {
        ptx::barrier_sync<6, WARPGROUP>();
      }
    }
  }

  // One step with the products of two steps in flight: the scores of tile n, and the output of the tile before.
  template <bool FREE>
  __device__ __forceinline__ void step(const WorkItem &item, int n, Scores &score, Probabilities &probability,
                                       Output &output, tile::RunningSoftmax &softmax) {
    wait_key();
    if constexpr (PING_PONG) {
      wait_turn<CONSUMERS>(group);
    }
    ptx::wgmma_hold(score);
    ptx::wgmma_hold(output);
    ptx::wgmma_hold(probability);
    ptx::wgmma_fence();
    issue_scores(score, query_low, key_stage(), narrow_query_low, narrow_key_stage());
    if constexpr (OVERLAP) {
      wait_value();
      ptx::wgmma_fence();
      issue_output(output, probability, value_stage());
    }
    if constexpr (PING_PONG) {
      pass_turn<CONSUMERS>(group);
    }
    ptx::wgmma_hold(score);
    ptx::wgmma_wait<OVERLAP ? 1 : 0>();
    ptx::wgmma_hold(score);
    add_term(score, item, n);
    if constexpr (!FREE) {
      mask(score, item, n);
    }
    if constexpr (FREE && MAXIMUM != EXACT) {
      const auto recompute = [&](Scores &again) {
        const uint32_t rows = (static_cast<uint32_t>(group) * 64 + threadIdx.x / 32 % 4 * 16) * 128;
        tile::warp_scores<TILE_M, TILE_N, HEAD_DIM>(again, base + QUERY_AT + rows,
                                                    base + KEY_AT + key.stage * KeyTile::BYTES);
        if constexpr (TERM == COLUMNS) {
          tile::add_narrow_scores<TILE_N>(again, base + NARROW_QUERY_AT + rows / 128 * tile::NARROW_ROW_BYTES,
                                          base + NARROW_KEY_AT + key.stage * NARROW_KEY_BYTES);
        }
        add_term(again, item, n);
      };
      float grown[2], added[2];
      if constexpr (MAXIMUM == STALE) {
        softmax.stale(score, p.factor, grown, added);
      } else {
        tile::exponentials(score, p.factor, softmax.shift, added);
      }
      tile::schedule_after(added[0], added[1]);
      finish_output(output, probability);
      if constexpr (MAXIMUM == STALE) {
        if (softmax.outgrown(grown, p.factor)) {
          softmax.rebase(score, output, p.factor, grown, added, recompute);
        }
      } else if (softmax.overgrown(added)) {
        softmax.reduce(score, output, p.factor, added, recompute);
      }
      softmax.sum[0] += added[0];
      softmax.sum[1] += added[1];
      release_key();
    } else {
      release_key();
      float correction[2];
      softmax.exact<!FREE>(score, p.factor, correction);
      tile::schedule_after(softmax.sum[0], softmax.sum[1]);
      finish_output(output, probability);
      tile::scale_rows(output, correction);
    }
    tile::pack_operand(probability, score);
    if constexpr (!OVERLAP) {
      last_output(probability, output);
    }
  }

  __device__ __forceinline__ void finish_output(Output &output, Probabilities &probability) {
    if constexpr (OVERLAP) {
      ptx::wgmma_hold(output);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(output);
      ptx::wgmma_hold(probability);
      release_value();
    }
  }

  __device__ __forceinline__ void first_scores(const WorkItem &item, int n, Scores &score,
                                               Probabilities &probability, tile::RunningSoftmax &softmax) {
    wait_key();
    ptx::wgmma_hold(score);
    ptx::wgmma_fence();
    issue_scores(score, query_low, key_stage(), narrow_query_low, narrow_key_stage());
    ptx::wgmma_hold(score);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(score);
    release_key();
    add_term(score, item, n);
    mask(score, item, n);
    float correction[2];
    softmax.exact<true>(score, p.factor, correction);
    tile::pack_operand(probability, score);
  }

  __device__ __forceinline__ void last_output(Probabilities &probability, Output &output) {
    wait_value();
    ptx::wgmma_hold(output);
    ptx::wgmma_hold(probability);
    ptx::wgmma_fence();
    issue_output(output, probability, value_stage());
    ptx::wgmma_hold(output);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(output);
    ptx::wgmma_hold(probability);
    release_value();
  }

  __device__ __forceinline__ void attend(const WorkItem &item, Output &output, tile::RunningSoftmax &softmax) {
    Scores score;
    Probabilities probability;
    ptx::mbarrier_wait(AFC_BARRIER(query_full), query_phase);
    query_phase ^= 1;
    rotate_query(item);
    int n = item.steps - 1;
    if constexpr (OVERLAP) {
      first_scores(item, n, score, probability, softmax);
      --n;
    }
    if constexpr (CAUSAL || !PEEL || !OVERLAP) {
#pragma unroll 1
      for (; n >= item.free_steps; --n) {
        step<false>(item, n, score, probability, output, softmax);
      }
    }
    if constexpr (PEEL) {
#pragma unroll 1
      for (; n >= 0; --n) {
        step<true>(item, n, score, probability, output, softmax);
      }
    }
    release(AFC_BARRIER(query_empty));
    if constexpr (OVERLAP) {
      last_output(probability, output);
    }
  }

  __device__ __forceinline__ void store(const WorkItem &item, const Output &output,
                                        const tile::RunningSoftmax &softmax) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.row_tile * TILE_M + group * 64 + warp * 16 + lane / 4 + 8 * half;
      const bool valid = row < p.rows;
      const float sum = tile::quad_sum(softmax.sum[half]);
      const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      uint16_t *out = p.out + item.batch * p.out_batch + item.head * p.out_head + row * p.out_row;
      tile::store_row(out, valid, output, half, inverse);
      if (valid && lane % 4 == 0) {
        const int64_t at = static_cast<int64_t>(item.batch * p.heads + item.head) * p.rows + row;
        p.lse[at] = sum > 0.0f ? softmax.shift[half] * LN_2 + __logf(sum) : tile::MINUS_INFINITY;
      }
    }
  }

  __device__ __forceinline__ void run() {
    tile::RingPlace<WORK_SLOTS> work;
    int index = static_cast<int>(blockIdx.x);
    if (PING_PONG && group == CONSUMERS - 1) {
      pass_turn<CONSUMERS>(group);
    }
#pragma unroll 1
    while (index < p.work_items) {
      const WorkItem item = work_item(p, index);
      Output output;
      tile::RunningSoftmax softmax;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) {
        output[i] = 0.0f;
      }
      if (item.steps > 0) {
        attend(item, output, softmax);
      }
      store(item, output, softmax);
      if constexpr (SCHEDULE != PERSISTENT) {
        return;
      }
      ptx::mbarrier_wait(AFC_BARRIER(work_full) + 8 * work.stage, work.phase);
      asm volatile("ld.shared.s32 %0, [%1];" : "=r"(index) : "r"(AFC_BARRIER(work) + 4 * work.stage) : "memory");
      index = __shfl_sync(0xffffffffu, index, 0);
      release(AFC_BARRIER(work_empty) + 8 * work.stage);
      work.advance();
    }
  }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void initialise_barriers(uint32_t base) {
  ptx::mbarrier_init(AFC_BARRIER(query_full), 1);
  ptx::mbarrier_init(AFC_BARRIER(query_empty), CONSUMER_WARPS);
  for (int stage = 0; stage < STAGES; ++stage) {
    ptx::mbarrier_init(AFC_BARRIER(key_full) + 8 * stage, 1);
    ptx::mbarrier_init(AFC_BARRIER(value_full) + 8 * stage, 1);
    ptx::mbarrier_init(AFC_BARRIER(key_empty) + 8 * stage, CONSUMER_WARPS);
    ptx::mbarrier_init(AFC_BARRIER(value_empty) + 8 * stage, CONSUMER_WARPS);
  }
  for (int slot = 0; slot < WORK_SLOTS; ++slot) {
    ptx::mbarrier_init(AFC_BARRIER(work_full) + 8 * slot, 1);
    ptx::mbarrier_init(AFC_BARRIER(work_empty) + 8 * slot, CONSUMER_WARPS);
  }
  ptx::mbarrier_init_fence();
}

// Dynamic shared memory: BARRIERS_AT + sizeof(Barriers) bytes, the start at a multiple of 1024.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ ForwardParameters parameters, const __grid_constant__ TensorMap query_map,
            const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
            const __grid_constant__ TensorMap narrow_query_map, const __grid_constant__ TensorMap narrow_key_map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&query_map);
    ptx::prefetch_tensor_map(&key_map);
    ptx::prefetch_tensor_map(&value_map);
    initialise_barriers(base);
  }
  __syncthreads();
  if (warp < 4) {
    ptx::registers_decrease<PRODUCER_REGISTERS>();
    if (warp == 0 && ptx::elect_one()) {
      produce(parameters, base, {&query_map, &key_map, &value_map, &narrow_query_map, &narrow_key_map});
    }
  } else {
    ptx::registers_increase<CONSUMER_REGISTERS>();
    const int group = warp / 4 - 1;
    Consumer consumer{parameters,
                      base,
                      group,
                      tile::descriptor_low<QueryTile::PANEL_BYTES>(base + QUERY_AT + group * 64 * 128),
                      tile::descriptor_low<KeyTile::PANEL_BYTES>(base + KEY_AT),
                      tile::descriptor_low<KeyTile::PANEL_BYTES>(base + VALUE_AT),
                      tile::descriptor_low<0>(base + NARROW_QUERY_AT + group * 64 * tile::NARROW_ROW_BYTES),
                      tile::descriptor_low<0>(base + NARROW_KEY_AT),
                      {},
                      {}};
    consumer.run();
  }
}

// Rotates (batch, position, head, HEAD_DIM) keys, contiguous, into a tensor of the same shape: eight pairs a thread.
extern "C" __global__ void __launch_bounds__(256)
    rotate_keys(const uint4 *keys, uint4 *rotated, const float2 *turns, int columns, int heads, int64_t rows) {
  constexpr int CHUNKS = HEAD_DIM / 16;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = index / CHUNKS;
  const int chunk = static_cast<int>(index % CHUNKS);
  if (row < rows) {
    const int64_t at = row * 2 * CHUNKS + chunk;
    uint4 first = keys[at], second = keys[at + CHUNKS];
    tile::rotate_chunk(first, second, turns + row / heads % columns * (HEAD_DIM / 2) + 8 * chunk);
    rotated[at] = first;
    rotated[at + CHUNKS] = second;
  }
}
