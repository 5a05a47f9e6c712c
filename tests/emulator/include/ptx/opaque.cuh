// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline uint32_t opaque_zero(int) { return 0; }

}  // namespace ptx
