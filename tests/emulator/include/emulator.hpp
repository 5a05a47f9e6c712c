// SPDX-License-Identifier: Apache-2.0
//
// CUDA's keywords, built-in variables and functions, for a C++ compiler. See tests/emulator/__init__.py.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "abi/afc_abi.h"

#define AFC_FN inline __attribute__((always_inline))
#define AFC_MEMBER inline __attribute__((always_inline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local
#define __restrict__ __restrict

namespace emulator {

struct Index {
  unsigned x, y, z;
};
extern thread_local Index thread_index, block_index, block_size, grid_size;

struct Kernel {
  const char *symbol;
  void (*run)(afc_args args);
};
struct Kernels {
  const Kernel *first;
  int count;
};

constexpr uint32_t SHARED_BYTES = 256 * 1024;

// Ends the launch with an error.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The lanes in `mask` meet: the last one to come calls combine(operands of all lanes, mask), then all go on.
void meet(uint32_t mask, void (*combine)(void **lanes, uint32_t mask), void *mine);
// All threads of the block that have not ended meet; returns how many gave `predicate`.
int meet_block(bool predicate);
// Lets other threads run; for loops that wait.
void yield();

uint32_t shared_offset(const void *pointer);
// Checked: bytes at the offset lie in the block's shared memory, and are aligned to their number.
unsigned char *shared_pointer(uint32_t offset, uint32_t bytes);

void copy_start(uint32_t destination, const void *source, uint32_t bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

}  // namespace emulator

extern thread_local unsigned char shared_memory[emulator::SHARED_BYTES];

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ---- barriers and exchange between lanes --------------------------------------------------------------------------

inline void __syncthreads() { emulator::meet_block(false); }
inline int __syncthreads_or(int predicate) { return emulator::meet_block(predicate != 0) > 0; }
inline int __syncthreads_count(int predicate) { return emulator::meet_block(predicate != 0); }
inline int __syncthreads_and(int predicate) { return emulator::meet_block(predicate == 0) == 0; }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulator::meet(mask, [](void **, uint32_t) {}, nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulator::yield(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }

namespace emulator {

template <class T> struct Exchange {
  T value, result;
  int from;
};

// Each lane gets the value of the lane `from`, in its segment of 32.
template <class T> T shuffle(uint32_t mask, T value, int from) {
  Exchange<T> mine{value, value, from};
  meet(
      mask,
      [](void **lanes, uint32_t present) {
        for (int lane = 0; lane < 32; ++lane) {
          if (!(present >> lane & 1)) continue;
          auto *own = static_cast<Exchange<T> *>(lanes[lane]);
          if (own->from < 0 || own->from > 31) continue;  // keeps its own
          if (!(present >> own->from & 1)) fail("a shuffle reads lane %d, which does not take part", own->from);
          own->result = static_cast<Exchange<T> *>(lanes[own->from])->value;
        }
      },
      &mine);
  return mine.result;
}

struct Vote {
  bool value;
  uint32_t result;
};
inline uint32_t ballot(uint32_t mask, bool value) {
  Vote mine{value, 0};
  meet(
      mask,
      [](void **lanes, uint32_t present) {
        uint32_t all = 0;
        for (int lane = 0; lane < 32; ++lane)
          if (present >> lane & 1) all |= uint32_t(static_cast<Vote *>(lanes[lane])->value) << lane;
        for (int lane = 0; lane < 32; ++lane)
          if (present >> lane & 1) static_cast<Vote *>(lanes[lane])->result = all;
      },
      &mine);
  return mine.result;
}

inline int lane() { return int((thread_index.x + block_size.x * (thread_index.y + block_size.y * thread_index.z)) % 32); }

}  // namespace emulator

template <class T> T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
  return emulator::shuffle(mask, value, (emulator::lane() & ~(width - 1)) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32) {
  const int from = emulator::lane() ^ bits;
  return emulator::shuffle(mask, value, from / width == emulator::lane() / width ? from : -1);
}
template <class T> T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int from = emulator::lane() - int(delta);
  return emulator::shuffle(mask, value, from >= (emulator::lane() & ~(width - 1)) ? from : -1);
}
template <class T> T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int from = emulator::lane() + int(delta);
  return emulator::shuffle(mask, value, from / width == emulator::lane() / width ? from : -1);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) { return emulator::ballot(mask, predicate != 0); }
inline int __any_sync(uint32_t mask, int predicate) { return emulator::ballot(mask, predicate != 0) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return emulator::ballot(mask, predicate != 0) == mask; }
inline uint32_t __activemask() { emulator::fail("__activemask() depends on how lanes are scheduled"); }

// ---- arithmetic ---------------------------------------------------------------------------------------------------

template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int b) { return b < a ? b : a; }
inline int64_t min(int a, int64_t b) { return b < a ? b : a; }
inline int64_t max(int64_t a, int b) { return a < b ? b : a; }
inline int64_t max(int a, int64_t b) { return a < b ? b : a; }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }

inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = uint64_t(uint32_t(high)) << 32 | uint32_t(low);
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
inline int __float_as_int(float value) { return int(__float_as_uint(value)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float sinpif(float x) { return float(::sin(double(x) * 3.14159265358979323846)); }
inline float cospif(float x) { return float(::cos(double(x) * 3.14159265358979323846)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(uint32_t(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
template <class T> inline T __ldg(const T *pointer) { return *pointer; }

// ---- atomics: blocks and fibers take turns, so ordinary operations are atomic -------------------------------------

template <class T> inline T atomicAdd(T *address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T> inline T atomicMax(T *address, T value) {
  const T before = *address;
  if (value > before) *address = value;
  return before;
}
template <class T> inline T atomicMin(T *address, T value) {
  const T before = *address;
  if (value < before) *address = value;
  return before;
}
template <class T> inline T atomicOr(T *address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}
template <class T> inline T atomicExch(T *address, T value) {
  const T before = *address;
  *address = value;
  return before;
}
template <class T> inline T atomicCAS(T *address, T expected, T value) {
  const T before = *address;
  if (before == expected) *address = value;
  return before;
}
