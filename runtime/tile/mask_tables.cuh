// SPDX-License-Identifier: Apache-2.0
//
// Least and largest values of captured tensors over boxes of indices, for the three-valued test of a mask
// (abi/afc_bounds.h): a kernel fills extents of fixed ranges along one axis, keep_box looks them up. The same bounds as
// afc/masks/tables.py, found by other ranges.
//
// Extents of a row are in chunks of 8192 elements: 256 of 32 elements, 16 of 512, and one of all. What lies beyond the
// row has no value, so that a range up to its end is whole.
#pragma once
#include "functions.cuh"

#include "abi/afc_bounds.h"

namespace afc {

constexpr int EXTENT_BLOCK = 32, EXTENT_FANOUT = 16;
constexpr int CHUNK_BLOCKS = EXTENT_FANOUT * EXTENT_FANOUT;
constexpr int EXTENT_CHUNK = EXTENT_BLOCK * CHUNK_BLOCKS;          // elements
constexpr int CHUNK_EXTENTS = CHUNK_BLOCKS + EXTENT_FANOUT + 1;
constexpr int EXACT_BOX = 64;  // elements of a box that are read where no table answers

// A captured tensor in a mask; `extents` of ranges along one axis, [other indices][chunk][CHUNK_EXTENTS], or null.
struct Table {
  const afc_captured *tensor;
  const Extent *extents;
};

AFC_FN int64_t extent_chunks(int64_t size) { return (size + EXTENT_CHUNK - 1) / EXTENT_CHUNK; }

// Choices of the indices of all axes but AXIS.
template <int RANK, int AXIS> AFC_FN int64_t other_indices(const afc_captured &tensor) {
  int64_t count = 1;
#pragma unroll
  for (int d = 0; d < RANK; ++d) count *= d == AXIS ? 1 : tensor.size[d];
  return count;
}

// The table of a tensor in whose place there is room for `chunks`; without extents where it does not fit.
template <int RANK, int AXIS> AFC_FN Table table_of(const afc_captured &tensor, const Extent *extents, int64_t chunks) {
  const int64_t needed = other_indices<RANK, AXIS>(tensor) * extent_chunks(tensor.size[AXIS]);
  return {&tensor, needed <= chunks ? extents : nullptr};
}

// ---- filling ---------------------------------------------------------------------------------------------------------

AFC_FN Extent from_lane(const Extent &x, int distance) {
  return {__shfl_xor_sync(0xffffffffu, x.lo, distance), __shfl_xor_sync(0xffffffffu, x.hi, distance),
          __shfl_xor_sync(0xffffffffu, int(x.nan), distance) != 0};
}

// The `index`-th of `chunks`: one chunk along AXIS of one choice of the other indices, by all THREADS of the CTA.
template <class T, int RANK, int AXIS, int THREADS>
AFC_FN void tabulate_chunk(const afc_captured &tensor, Extent *extents, int64_t index, int64_t chunks) {
  constexpr int LANES = 8;  // that read one block
  static_assert(CHUNK_BLOCKS * LANES % THREADS == 0 && THREADS % 32 == 0, "whole warps in every step");
  __shared__ Extent blocks[CHUNK_BLOCKS];
  const int64_t size = tensor.size[AXIS], stride = tensor.stride[AXIS];
  const int in_row = static_cast<int>(extent_chunks(size));
  if (table_of<RANK, AXIS>(tensor, extents, chunks).extents == nullptr) return;
  if (index >= other_indices<RANK, AXIS>(tensor) * in_row) return;
  const int chunk = static_cast<int>(index % in_row);
  int64_t offset = 0, rest = index / in_row;
#pragma unroll
  for (int d = RANK - 1; d >= 0; --d) {
    if (d == AXIS) continue;
    offset += rest % tensor.size[d] * tensor.stride[d];
    rest /= tensor.size[d];
  }
  const int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int step = 0; step < CHUNK_BLOCKS * LANES / THREADS; ++step) {
    const int block = (step * THREADS + threadIdx.x) / LANES;
    const int64_t first = int64_t(chunk) * EXTENT_CHUNK + block * EXTENT_BLOCK + lane;
    T values[EXTENT_BLOCK / LANES];
#pragma unroll
    for (int e = 0; e < EXTENT_BLOCK / LANES; ++e) {
      const int64_t at = first + e * LANES;
      values[e] = read_at<T>(tensor, at < size ? offset + at * stride : -1);
    }
    Extent found = Extent::none();
#pragma unroll
    for (int e = 0; e < EXTENT_BLOCK / LANES; ++e)
      if (first + e * LANES < size) found.add(extent(values[e]));
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) found.add(from_lane(found, distance));
    if (lane == 0) blocks[block] = found;
  }
  __syncthreads();
  Extent *to = extents + index * CHUNK_EXTENTS;
  for (int k = threadIdx.x; k < CHUNK_BLOCKS; k += THREADS) to[k] = blocks[k];
  if (threadIdx.x >= 32) return;
  const int group = threadIdx.x % EXTENT_FANOUT;
  Extent found = Extent::none();
  for (int k = 0; k < EXTENT_FANOUT; ++k) found.add(blocks[group * EXTENT_FANOUT + k]);
  if (threadIdx.x < EXTENT_FANOUT) to[CHUNK_BLOCKS + group] = found;
#pragma unroll
  for (int distance = 1; distance < EXTENT_FANOUT; distance *= 2) found.add(from_lane(found, distance));
  if (threadIdx.x == 0) to[CHUNK_BLOCKS + EXTENT_FANOUT] = found;
}

// ---- looking up ------------------------------------------------------------------------------------------------------

// Adds read(k) of all k in begin .. end - 1 before the first and behind the last multiple of STEP there; begin and end
// become what is left, in units of STEP.
template <int STEP, class Read> AFC_FN void add_ends(Extent &found, int &begin, int &end, const Read &read) {
  const int before = min((begin + STEP - 1) / STEP * STEP, end) - begin;
  const int behind = min(end % STEP, end - begin - before);
#pragma unroll 1
  for (int k = 0; k < before + behind; ++k) found.add(read(k < before ? begin + k : end - behind + (k - before)));
  begin = (begin + before) / STEP;
  end = (end - behind) / STEP;
}

// Of the elements begin .. end - 1 of a row; read(k) gives the extent of one element.
template <class Read>
AFC_FN Extent extent_of_range(const Extent *row, int begin, int end, int size, const Read &read) {
  Extent found = Extent::none();
  const bool from_a_block = (begin + EXTENT_BLOCK - 1) / EXTENT_BLOCK * EXTENT_BLOCK <= size;
  if (end == size && from_a_block) end = static_cast<int>(extent_chunks(size)) * EXTENT_CHUNK;
  add_ends<EXTENT_BLOCK>(found, begin, end, read);
  add_ends<EXTENT_FANOUT>(found, begin, end, [row](int k) {
    return row[k / CHUNK_BLOCKS * CHUNK_EXTENTS + k % CHUNK_BLOCKS];
  });
  add_ends<EXTENT_FANOUT>(found, begin, end, [row](int k) {
    return row[k / EXTENT_FANOUT * CHUNK_EXTENTS + CHUNK_BLOCKS + k % EXTENT_FANOUT];
  });
#pragma unroll 1
  for (; begin < end; ++begin) found.add(row[begin * CHUNK_EXTENTS + CHUNK_BLOCKS + EXTENT_FANOUT]);
  return found;
}

// Of the `count` elements of the box low .. high (both included).
template <class T, int RANK>
AFC_FN Extent extent_of_box(const afc_captured &tensor, const int (&low)[RANK + 1], const int (&high)[RANK + 1],
                            int count) {
  Extent found = Extent::none();
  int index[RANK + 1];
  int64_t offset = 0;
#pragma unroll
  for (int d = 0; d < RANK; ++d) {
    index[d] = low[d];
    offset += low[d] * tensor.stride[d];
  }
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    found.add(extent(read_at<T>(tensor, offset)));
    bool carry = true;
#pragma unroll
    for (int d = RANK - 1; d >= 0; --d) {  // the next element
      const bool more = index[d] < high[d];
      const int step = !carry ? 0 : more ? 1 : low[d] - high[d];
      index[d] += step;
      offset += step * tensor.stride[d];
      carry = carry && !more;
    }
  }
  return found;
}

AFC_FN Ints bounds_of(int64_t, const Extent &x, bool known, bool inside) {
  if (!known) return Ints::anything();
  return inside ? Ints::raw(x.lo, x.hi) : Ints::raw(min(x.lo, 0.0), max(x.hi, 0.0));
}
AFC_FN Truth bounds_of(bool, const Extent &x, bool known, bool inside) {
  if (!known) return {true, false};
  return {x.hi > 0, inside && x.lo > 0};
}
AFC_FN Reals bounds_of(float, const Extent &x, bool known, bool inside) {
  if (!known || x.lo > x.hi) return Reals::anything();
  return {x.lo, x.hi, x.nan || !inside};
}

// Bounds of table[indices...] as T (float, int64_t or bool); what lies outside the tensor reads as NaN, 0 or false.
// AXIS: along which the table has extents, -1 for none.
template <class T, int AXIS, class... Index>
AFC_FN auto bounds_at(const Table &table, const Index &...indices) {
  constexpr int RANK = sizeof...(indices);
  const Ints index[RANK + 1] = {Ints(indices)..., Ints(0)};
  const afc_captured &tensor = *table.tensor;
  int low[RANK + 1] = {}, high[RANK + 1] = {};
  bool inside = true, partly = true, others = true;  // others: all dimensions but AXIS have one index
  double count = 1;
  int64_t row = 0, offset = 0;
#pragma unroll
  for (int d = 0; d < RANK; ++d) {
    const double last = double(tensor.size[d] - 1);
    inside = inside && index[d].lo >= 0 && index[d].hi <= last;
    // A dimension of size 1 may give its element at any index.
    partly = partly && (tensor.size[d] == 1 || (index[d].hi >= 0 && index[d].lo <= last));
    low[d] = tensor.size[d] == 1 ? 0 : int(max(index[d].lo, 0.0));
    high[d] = tensor.size[d] == 1 ? 0 : int(min(index[d].hi, last));
    count *= double(high[d] - low[d]) + 1;
    if (d == AXIS) continue;
    others = others && low[d] == high[d];
    row = row * tensor.size[d] + low[d];
    offset += low[d] * tensor.stride[d];
  }
  bool known = true;
  Extent found = Extent::none();  // stays so where nothing is inside: what is joined to it decides
  bool read_all = partly;
  if constexpr (AXIS >= 0) {
    if (partly && others && table.extents != nullptr) {
      read_all = false;
      const int size = static_cast<int>(tensor.size[AXIS]);
      const Extent *extents = table.extents + row * extent_chunks(size) * CHUNK_EXTENTS;
      found = extent_of_range(extents, low[AXIS], high[AXIS] + 1, size, [&](int k) {
        return extent(read_at<T>(tensor, offset + k * tensor.stride[AXIS]));
      });
    }
  }
  if (read_all) {
    known = count <= EXACT_BOX;
    if (known) found = extent_of_box<T, RANK>(tensor, low, high, int(count));
  }
  return bounds_of(T(), found, known, inside);
}

}  // namespace afc
