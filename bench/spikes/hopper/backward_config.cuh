// SPDX-License-Identifier: Apache-2.0
//
// The configuration of one cubin of backward.cu, its arguments and its shared memory.
#pragma once
#include <stdint.h>

constexpr int kHeadDim = HEAD_DIM;
constexpr int kRows = Q_ROWS;  // queries per step
constexpr int kKeys = 128;     // keys per block, 64 per consumer warpgroup
constexpr bool kCausal = CAUSAL;
constexpr bool kPipelined = PIPELINED;

constexpr bool kDqSoon = DQ_SOON;  // dQ is issued before dK has completed
constexpr bool kTermsEarly = TERMS_EARLY;  // not pipelined: LSE and delta are read before the product is waited for

constexpr int kRedEarly = 0;
constexpr int kRedLate = 1;
constexpr int kBulk = 2;
constexpr int kDqMode = DQ_MODE;

// The two consumers share dQ = dS K: halves of D (64 queries), of the queries (128), or dQ^T by halves of D (80).
constexpr bool kDqSwapped = kRows == 80;
constexpr int kDqColumns = kDqSwapped ? kRows : 64;
constexpr int kDqCount = kDqColumns / 2;
constexpr int kDsStages = kRows == 80 && kDqMode == kBulk ? 1 : 2;

static_assert((kHeadDim == 128 && (kRows == 64 || kRows == 80)) || (kHeadDim == 64 && kRows == 128), "tile");
static_assert(!kPipelined || kDsStages == 2, "dS of one item is read while the next is written");

struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

struct Arguments {
  const void *o, *d_o;  // bf16 (batch, query head, q_len, D)
  const float *lse;     // natural logarithm (batch, query head, q_len)
  void *dq;             // bf16, as o
  float *dq_sums;       // (batch, query head, padded_rows, D), tiles in fragment order
  float *row_lse;       // (batch, query head, padded_rows), log2 units
  float *row_delta;
  int batches, k_heads, group;  // query heads = k_heads * group
  int q_len, k_len, padded_rows;
  int offset;         // causal: key j is visible to query i when j <= i + offset
  int section_heads;  // key heads that are worked on together
  float scale;
};

// Shared memory, bytes. Tiles are panels of 64 columns (128 bytes a row, 128-byte swizzle).
constexpr int kPanels = kHeadDim / 64;
constexpr int kKeyPanel = kKeys * 128;
constexpr int kRowPanel = kRows * 128;
constexpr int kKeyTile = kPanels * kKeyPanel;
constexpr int kRowTile = kPanels * kRowPanel;
constexpr int kDsTile = (kRows + 63) / 64 * kKeyPanel;

constexpr int kKAt = 0;
constexpr int kVAt = kKAt + kKeyTile;
constexpr int kQAt = kVAt + kKeyTile;  // 2 stages
constexpr int kDoAt = kQAt + 2 * kRowTile;
constexpr int kDsAt = kDoAt + 2 * kRowTile;
constexpr int kDqAt = kDsAt + kDsStages * kDsTile;
constexpr int kLseAt = kDqAt + (kDqMode == kBulk ? kRows * kHeadDim * 4 : 0);
constexpr int kDeltaAt = kLseAt + 2 * kRows * 4;
constexpr int kBarriersAt = kDeltaAt + 2 * kRows * 4;
constexpr int kQFull = kBarriersAt;
constexpr int kDoFull = kQFull + 16;
constexpr int kQEmpty = kDoFull + 16;
constexpr int kDoEmpty = kQEmpty + 16;
constexpr int kDsFull = kDoEmpty + 16;
constexpr int kKFull = kDsFull + 16;
constexpr int kVFull = kKFull + 8;
constexpr int kSharedBytes = kVFull + 8;
static_assert(kSharedBytes <= 232448, "shared memory of one block");
