// SPDX-License-Identifier: Apache-2.0
//
// Place in a ring of STAGES buffers. Producer and consumer each carry one, which never resets between work items.
#pragma once
#include <stdint.h>

namespace tile {

template <int STAGES>
struct RingPlace {
  uint32_t stage = 0;
  uint32_t phase = 0;  // parity that a consumer waits for; a producer waits for the other one

  __device__ __forceinline__ void advance() {
    if constexpr (STAGES == 2) {
      phase ^= stage;
      stage ^= 1;
    } else {
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      phase ^= stage == 0 ? 1 : 0;
    }
  }
};

}  // namespace tile
