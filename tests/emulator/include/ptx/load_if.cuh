// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline uint32_t load_u32_if(bool condition, const void *address) {
  return condition ? *static_cast<const uint32_t *>(address) : 0;
}
inline uint16_t load_u16_if(bool condition, const void *address) {
  return condition ? *static_cast<const uint16_t *>(address) : 0;
}

}  // namespace ptx
