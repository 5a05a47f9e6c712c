// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // .ftz
}

}  // namespace ptx
