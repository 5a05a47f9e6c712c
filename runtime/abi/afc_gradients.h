// SPDX-License-Identifier: Apache-2.0
//
// Gradients of captured tensors in the call interface: zero-filled or not, contiguous but for dimensions of stride 0.
#ifndef AFC_GRADIENTS_H
#define AFC_GRADIENTS_H

#include "afc_run.h"

// Elements of a gradient: dimensions of stride 0 are summed over.
AFC_FN int64_t gradient_size(const afc_captured &gradient) {
  int64_t size = 1;
  for (int d = 0; d < gradient.rank; ++d) size *= gradient.stride[d] == 0 ? 1 : gradient.size[d];
  return size;
}

#endif  // AFC_GRADIENTS_H
