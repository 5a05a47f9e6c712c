// SPDX-License-Identifier: Apache-2.0
//
// What roles of a block need beside their work: register budgets, one elected lane, barriers of some of the threads.
#pragma once
#include <stdint.h>

namespace ptx {

// Executed by all warps of a warpgroup. The kernel must carry __launch_bounds__(threads, 1), else ptxas ignores it.
template <int REGISTERS>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Named barriers take immediates: an id in a register makes ptxas reserve all 16. Id 0 is __syncthreads.
template <int ID, int THREADS>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" : : "n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS>
__device__ __forceinline__ void barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" : : "n"(ID), "n"(THREADS) : "memory");
}

}  // namespace ptx
