// SPDX-License-Identifier: Apache-2.0
//
// A number in [0, 1) for each element of a score matrix: the function of afc/expr/random.py, bit by bit.
#ifndef AFC_RANDOM_H
#define AFC_RANDOM_H

#include "afc_run.h"

namespace afc {

// The finalizer of MurmurHash3.
AFC_FN uint32_t mix_bits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

struct RandomState {
  uint32_t x, y;

  AFC_MEMBER void add(uint32_t word) {
    x = mix_bits((x ^ word) + y);
    y = mix_bits((y ^ x) + 0x9e3779b9u);
  }
};

// A multiple of 2^-24. Integers of any width; of all but the seed only the low 32 bits count.
template <class Seed, class B, class H, class M, class N> AFC_FN float random(Seed seed, B b, H h, M m, N n) {
  const int64_t wide = seed;
  RandomState state{0x243f6a88u, 0x85a308d3u};
  state.add(uint32_t(wide));
  state.add(uint32_t(wide >> 32));
  state.add(uint32_t(b));
  state.add(uint32_t(h));
  state.add(uint32_t(m));
  state.add(uint32_t(n));
  return float(int(state.y >> 8)) * 5.9604644775390625e-8f;  // an int, which vector units convert
}

}  // namespace afc
#endif  // AFC_RANDOM_H
