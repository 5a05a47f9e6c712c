// SPDX-License-Identifier: Apache-2.0
//
// What a module expects of the gradients of captured tensors that a call asks for.
#ifndef AFC_HOST_GRADIENTS_H
#define AFC_HOST_GRADIENTS_H

#include "abi/afc_abi.h"
#include "host/status.h"

// A gradient is of type `dtype`, contiguous over the dimensions whose stride is not 0.
static inline int afc_check_gradient(const afc_args &args, int slot, int dtype) {
  const afc_captured &gradient = args.grad_captured[slot];
  if (gradient.data == nullptr) return AFC_OK;
  if (gradient.dtype != dtype) {
    return afc_fail(AFC_BAD_ARGUMENT, "grad_captured[%d]: expected dtype %d (that of the LSE), got %d", slot, dtype,
                    int(gradient.dtype));
  }
  int64_t stride = 1;
  for (int d = gradient.rank - 1; d >= 0; --d) {
    if (gradient.stride[d] == 0) continue;
    if (gradient.size[d] != 1 && gradient.stride[d] != stride) {
      return afc_fail(AFC_BAD_ARGUMENT, "grad_captured[%d]: expected a contiguous gradient", slot);
    }
    stride *= gradient.size[d];
  }
  return AFC_OK;
}

#endif  // AFC_HOST_GRADIENTS_H
