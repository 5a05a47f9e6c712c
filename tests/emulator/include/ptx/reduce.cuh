// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline void red_add(float *address, float value) { *address += value; }

}  // namespace ptx
