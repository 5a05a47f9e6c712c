// SPDX-License-Identifier: Apache-2.0
//
// What generated device functions and kernels share: the compute type, the run of indices, the lane's place in a
// fragment, and pointers into strided tensors.
#pragma once
#include <stdint.h>

#include "abi/afc_abi.h"
#include "abi/afc_run.h"
#include "ptx/opaque.cuh"

using Real = float;

namespace tile {

// A compile-time constant as the argument of a generic lambda.
template <class T, T VALUE>
struct Constant {
  static constexpr T value = VALUE;
};

constexpr float INFINITE = __builtin_huge_valf();
constexpr int WARP = 32;

// The thread's index, made to depend on the step of a loop (never negative) in a way that the compiler does not
// see through. What is derived from it is computed in the loop, instead of being kept in registers, and spilled.
AFC_FN uint32_t thread_in_step(int step) { return threadIdx.x + ptx::opaque_zero(step); }

AFC_FN uint32_t lane_index() { return threadIdx.x % WARP; }

// Uniform over the warp, and known to be by the compiler: addresses built on it stay in uniform registers.
AFC_FN uint32_t warp_index(uint32_t thread) { return __shfl_sync(0xffffffffu, thread / WARP, 0); }

// Row (0..7; element 2 and 3 of an accumulator are 8 further down) and first column of a lane in a 16x8 accumulator.
AFC_FN int fragment_row() { return static_cast<int>(lane_index() / 4); }
AFC_FN int fragment_column() { return static_cast<int>(lane_index() % 4 * 2); }

// Address of row `row` of (batch, head) of a tensor of 16-bit elements.
AFC_FN unsigned char *row_address(const afc_tensor &tensor, int batch, int head, int64_t row) {
  const int64_t element = batch * tensor.stride[0] + head * tensor.stride[1] + row * tensor.stride[2];
  return static_cast<unsigned char *>(tensor.data) + element * 2;
}

// A contiguous [B, H, rows, columns] workspace tensor, as a strided one.
AFC_FN afc_tensor contiguous(void *data, int64_t heads, int64_t rows, int columns) {
  return {data, {heads * rows * columns, rows * columns, columns, 1}};
}

AFC_FN constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
AFC_FN constexpr int larger(int a, int b) { return a > b ? a : b; }

// What a batch entry has of its own: positions of row 0 of q and of k, and the number of keys that are there.
struct Places {
  int64_t q_origin, k_origin;
  int keys;
};

AFC_FN int64_t origin_of(const int64_t *per_batch, int64_t origin, int batch, int64_t rows) {
  constexpr int64_t largest = (int64_t(1) << 30) - 1;  // so that a difference of positions fits 32 bits
  return per_batch == nullptr ? origin : min(max(per_batch[batch], -largest), largest - rows);
}

// Values in device memory cannot be refused without waiting for them, so they are brought into their range.
AFC_FN int key_count(const afc_args &args, int batch) {
  if (args.kv_len_per_batch == nullptr) return static_cast<int>(args.N);
  return static_cast<int>(min(max(args.kv_len_per_batch[batch], int64_t(0)), args.N));
}

AFC_FN Places places_of(const afc_args &args, int batch) {
  return {origin_of(args.q_origin_per_batch, args.q_origin, batch, args.M),
          origin_of(args.k_origin_per_batch, args.k_origin, batch, args.N), key_count(args, batch)};
}

}  // namespace tile
