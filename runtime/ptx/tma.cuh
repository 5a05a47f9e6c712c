// SPDX-License-Identifier: Apache-2.0
//
// TMA: bulk copies between global and shared memory by one thread. Loads complete on an mbarrier (a box outside the
// tensor counts in full and arrives as zeros); stores and reductions complete by groups of the issuing thread.
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ void prefetch_tensor_map(const void *map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Coordinates count elements, the innermost dimension first.
__device__ __forceinline__ void tma_load_4d(uint32_t destination, const void *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(destination), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(const void *map, uint32_t source, int32_t c0, int32_t c1, int32_t c2,
                                             int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Contiguous bytes: addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void *source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(destination), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_add_f32(float *destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }

// At most PENDING groups have yet to read their shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(PENDING) : "memory");
}

// By every thread that wrote shared memory with ordinary stores which wgmma or TMA reads, before the barrier between.
__device__ __forceinline__ void proxy_fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

}  // namespace ptx
