// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline void cp_async_16(uint32_t destination, const void *source, bool valid) {
  emulator::copy_start(destination, source, 16, valid);
}
inline void cp_async_8(uint32_t destination, const void *source, bool valid) {
  emulator::copy_start(destination, source, 8, valid);
}
inline void cp_async_commit() { emulator::copy_commit(); }
template <int PENDING>
inline void cp_async_wait() {
  emulator::copy_wait(PENDING);
}

}  // namespace ptx
