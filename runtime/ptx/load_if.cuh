// SPDX-License-Identifier: Apache-2.0
//
// Loads of global memory under a condition: without it 0, and nothing is read. They are no branches, so that many of
// them are on their way at once. For memory that does not change during the kernel.
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t load_u32_if(bool condition, const void *address) {
  uint32_t value;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n mov.u32 %0, 0;\n @p ld.global.u32 %0, [%2];\n}"
      : "=r"(value)
      : "r"(static_cast<uint32_t>(condition)), "l"(address));
  return value;
}

__device__ __forceinline__ uint16_t load_u16_if(bool condition, const void *address) {
  uint16_t value;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n mov.u16 %0, 0;\n @p ld.global.u16 %0, [%2];\n}"
      : "=h"(value)
      : "r"(static_cast<uint32_t>(condition)), "l"(address));
  return value;
}

}  // namespace ptx
