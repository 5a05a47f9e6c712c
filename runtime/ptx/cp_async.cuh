// SPDX-License-Identifier: Apache-2.0
//
// cp.async: copies from global to shared memory that do not pass through registers. What is not valid is filled with
// zeros and its address is not read.
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ void cp_async_16(uint32_t destination, const void *source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(destination), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_8(uint32_t destination, const void *source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
               :
               : "r"(destination), "l"(source), "r"(valid ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until at most PENDING of the calling thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

}  // namespace ptx
