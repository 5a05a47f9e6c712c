// SPDX-License-Identifier: Apache-2.0
//
// How a GPU kernel's sums for gradients of captured tensors are shared out: which part of the batch entries, heads
// and tiles of rows a block visits, and which gradients blocks sum in copies of their own because they would add to
// the same elements. Host code (sizes, grids) and kernels compute the same from the arguments of a call.
#ifndef AFC_SHARES_H
#define AFC_SHARES_H

#include "afc_gradients.h"

// Whether an index that takes `extent` values and is that of a dimension (-1: of none) names each element once.
AFC_FN bool one_to_one(const afc_captured &gradient, int dimension, int64_t extent) {
  return dimension >= 0 && (extent <= 1 || (gradient.stride[dimension] != 0 && gradient.size[dimension] != 1));
}

struct Shares {
  static constexpr int64_t COPIES = 1 << 22;  // floats that all copies may have
  static constexpr int64_t BLOCKS = 1024;     // that are enough, where more need more copies

  int64_t whole[3], parts[3];  // of batch entries, heads, tiles of rows: a block visits every parts-th
  int count;                   // gradients; one that is not asked for has size 0
  float *data[AFC_MAX_CAPTURED];
  int64_t size[AFC_MAX_CAPTURED], start[AFC_MAX_CAPTURED];  // start: of its copies among all
  int owned[AFC_MAX_CAPTURED];                              // bit per axis: parts add to different elements

  AFC_MEMBER void begin(int64_t batch, int64_t heads, int64_t tiles) {
    whole[0] = batch, whole[1] = heads, whole[2] = tiles;
    parts[0] = parts[1] = parts[2] = 1;
    count = 0;
  }

  // A gradient, and the dimensions that the batch entry, the head and the row alone index (-1: none).
  AFC_MEMBER void add(const afc_captured &gradient, int batch, int head, int row, int64_t rows) {
    const bool wanted = gradient.data != nullptr;
    data[count] = static_cast<float *>(gradient.data);
    size[count] = wanted ? gradient_size(gradient) : 0;
    owned[count] = one_to_one(gradient, batch, whole[0]) | one_to_one(gradient, head, whole[1]) << 1 |
                   one_to_one(gradient, row, rows) << 2;
    ++count;
  }

  AFC_MEMBER int64_t copies(int k) const {
    int64_t product = 1;
    for (int axis = 0; axis < 3; ++axis) {
      if ((owned[k] >> axis & 1) == 0) product *= parts[axis];
    }
    return product;
  }

  AFC_MEMBER bool copied(int k) const { return size[k] > 0 && copies(k) > 1; }

  // Floats of all copies.
  AFC_MEMBER int64_t floats() const {
    int64_t total = 0;
    for (int k = 0; k < count; ++k) total += copied(k) ? size[k] * copies(k) : 0;
    return total;
  }

  AFC_MEMBER bool wanted() const {
    for (int k = 0; k < count; ++k) {
      if (size[k] > 0) return true;
    }
    return false;
  }

  // Splits as far as the copies permit; depends on shapes alone, and so does the order of every sum.
  AFC_MEMBER void split() {
    for (int axis = 1; axis >= 0; --axis) {
      parts[axis] = whole[axis];
      if (floats() > COPIES) parts[axis] = 1;
    }
    parts[2] = whole[2];
    if (floats() > 0) {
      const int64_t others = parts[0] * parts[1], enough = others < BLOCKS ? BLOCKS / (others > 0 ? others : 1) : 1;
      if (parts[2] > enough) parts[2] = enough;
      while (parts[2] > 1 && floats() > COPIES) parts[2] = (parts[2] + 1) / 2;
    }
    int64_t at = 0;
    for (int k = 0; k < count; ++k) {
      start[k] = at;
      if (copied(k)) at += size[k] * copies(k);
    }
  }

  AFC_MEMBER int64_t blocks() const {
    return whole[0] == 0 || whole[1] == 0 || whole[2] == 0 ? 0 : parts[0] * parts[1] * parts[2];
  }

  // The same of a kernel that has nothing else to do.
  AFC_MEMBER int64_t wanted_blocks() const { return wanted() ? blocks() : 0; }

  // Where block `block` adds for gradient k: to its copy, or to the gradient itself; null where it is not asked for.
  AFC_MEMBER float *target(int k, int64_t block, float *copies_data) const {
    if (size[k] == 0) return nullptr;
    if (!copied(k)) return data[k];
    const int64_t own[3] = {block / (parts[2] * parts[1]), block / parts[2] % parts[1], block % parts[2]};
    int64_t copy = 0;
    for (int axis = 0; axis < 3; ++axis) {
      if ((owned[k] >> axis & 1) == 0) copy = copy * parts[axis] + own[axis];
    }
    return copies_data + start[k] + copy * size[k];
  }

  // Elements of the largest gradient with copies.
  AFC_MEMBER int64_t largest() const {
    int64_t most = 0;
    for (int k = 0; k < count; ++k) most = copied(k) && size[k] > most ? size[k] : most;
    return most;
  }
};

#endif  // AFC_SHARES_H
