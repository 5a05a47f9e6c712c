// SPDX-License-Identifier: Apache-2.0
//
// Gradients of captured tensors: sums over scores, in a fixed order whatever the number of threads. Work is
// split along those of batch, query head and query tile that each tensor is indexed by, so that no two tasks
// add to one element; a small tensor does not restrict the split, each task adds to a copy of its own.
#ifndef AFC_CPU_CAPTURED_HPP
#define AFC_CPU_CAPTURED_HPP

#include "abi/afc_gradients.h"
#include "element.hpp"
#include "host/gradients.h"

namespace afc {

using ::gradient_size;

constexpr int BATCH = 0, HEAD = 1, TILE = 2;  // axes along which work may be split
constexpr int64_t COPIES = 1 << 22;  // elements that all copies of a small tensor may have

// A captured tensor that can have a gradient. `axis`: the dimension that the batch, the query head or the query
// row alone indexes, -1 where none. `also`: its gradient holds a part already, which is added to.
struct CapturedGradient {
  int slot;
  int axis[3];
  bool also = false;
};

// How the work is split, and which gradients are summed in copies.
template <int COUNT> struct Shares {
  int64_t count[3];      // tasks along each axis
  bool copied[COUNT];
  int64_t start[COUNT];  // of a gradient among the copies of a task
  int64_t copy_size;     // doubles per task

  int64_t tasks() const { return count[BATCH] * count[HEAD] * count[TILE]; }
};

// Whether tasks that differ in an axis add to different elements.
AFC_FN bool owns(const CapturedGradient &what, const afc_captured &gradient, int axis) {
  return what.axis[axis] >= 0 && gradient.stride[what.axis[axis]] != 0;
}

template <int COUNT>
AFC_FN Shares<COUNT> share_out(const afc_args &args, const CapturedGradient (&what)[COUNT], int64_t tiles,
                               const bool (&split)[3]) {
  const int64_t whole[3] = {args.B, args.Hq, tiles};
  Shares<COUNT> shares{};
  for (int axis = 0; axis < 3; ++axis) shares.count[axis] = split[axis] ? whole[axis] : min(int64_t(1), whole[axis]);
  for (int k = 0; k < COUNT; ++k) {
    const afc_captured &gradient = args.grad_captured[what[k].slot];
    if (gradient.data == nullptr) continue;
    for (int axis = 0; axis < 3; ++axis) {
      if (shares.count[axis] > 1 && !owns(what[k], gradient, axis)) shares.copied[k] = true;
    }
    shares.start[k] = shares.copy_size;
    if (shares.copied[k]) shares.copy_size += gradient_size(gradient);
  }
  return shares;
}

// Depends on the shapes alone. Without a large tensor: a task for each query head of each batch.
template <int COUNT>
AFC_FN Shares<COUNT> share_out(const afc_args &args, const CapturedGradient (&what)[COUNT], int64_t tiles) {
  bool split[3] = {true, true, false}, large = false;
  for (int k = 0; k < COUNT; ++k) {
    const afc_captured &gradient = args.grad_captured[what[k].slot];
    if (gradient.data == nullptr) continue;
    if (gradient_size(gradient) <= COPIES / max(int64_t(1), args.B * args.Hq)) continue;
    for (int axis = 0; axis < 3; ++axis) {
      split[axis] = (split[axis] || (axis == TILE && !large)) && owns(what[k], gradient, axis);
    }
    large = true;
  }
  const Shares<COUNT> shares = share_out(args, what, tiles, split);
  if (shares.tasks() * shares.copy_size <= COPIES) return shares;
  split[TILE] = false;
  return share_out(args, what, tiles, split);
}

// Calls visit(b, h, tile) for each of `tiles` query tiles of each head that is a task's, one after the other.
template <int COUNT, class Visit>
AFC_FN void visit_tiles(const afc_args &args, const Shares<COUNT> &shares, int64_t task, int64_t tiles,
                        Visit visit) {
  const int64_t whole[3] = {args.B, args.Hq, tiles};
  int64_t begin[3], end[3];
  for (int axis = 2; axis >= 0; --axis) {
    const bool split = shares.count[axis] > 1;
    begin[axis] = split ? task % shares.count[axis] : 0;
    end[axis] = split ? begin[axis] + 1 : whole[axis];
    task /= shares.count[axis];
  }
  for (int64_t b = begin[BATCH]; b < end[BATCH]; ++b) {
    for (int64_t h = begin[HEAD]; h < end[HEAD]; ++h) {
      for (int64_t tile = begin[TILE]; tile < end[TILE]; ++tile) visit(b, h, tile);
    }
  }
}

// Where a task adds what it finds for one tensor.
template <class Real> struct CapturedSum {
  double *copy;  // null: straight to the gradient
  Real *gradient;

  void add(int64_t offset, double value) const {
    if (offset < 0) return;
    if (copy != nullptr) {
      copy[offset] += value;
    } else {
      gradient[offset] = Real(gradient[offset] + value);
    }
  }
};

template <int COUNT> AFC_FN bool any_gradient(const afc_args &args, const CapturedGradient (&what)[COUNT]) {
  for (const CapturedGradient &one : what) {
    if (args.grad_captured[one.slot].data != nullptr) return true;
  }
  return false;
}

// Gradients that tasks add to directly start from 0.
template <class Real, int COUNT>
AFC_FN void clear_gradients(const afc_args &args, const CapturedGradient (&what)[COUNT],
                            const Shares<COUNT> &shares) {
  for (int k = 0; k < COUNT; ++k) {
    const afc_captured &gradient = args.grad_captured[what[k].slot];
    if (gradient.data == nullptr || shares.copied[k] || what[k].also) continue;
    std::memset(gradient.data, 0, size_t(gradient_size(gradient)) * sizeof(Real));
  }
}

// Sums the copies of all tasks, in their order.
template <class Real, int COUNT>
AFC_FN void add_copies(const afc_args &args, const CapturedGradient (&what)[COUNT], const Shares<COUNT> &shares,
                       const double *copies) {
  for (int k = 0; k < COUNT; ++k) {
    if (!shares.copied[k]) continue;
    const afc_captured &gradient = args.grad_captured[what[k].slot];
    Real *to = static_cast<Real *>(gradient.data);
    const int64_t size = gradient_size(gradient), tasks = shares.tasks();
    for (int64_t e = 0; e < size; ++e) {
      double sum = 0;
      for (int64_t task = 0; task < tasks; ++task) sum += copies[task * shares.copy_size + shares.start[k] + e];
      to[e] = Real(what[k].also ? to[e] + sum : sum);
    }
  }
}

template <class Real> AFC_FN int check_gradient(const afc_args &args, int slot) {
  return afc_check_gradient(args, slot, sizeof(Real) == 8 ? AFC_FLOAT64 : AFC_FLOAT32);
}

template <class Real, int COUNT>
AFC_FN int check_gradients(const afc_args &args, const CapturedGradient (&what)[COUNT]) {
  for (const CapturedGradient &one : what) {
    if (int status = check_gradient<Real>(args, one.slot)) return status;
  }
  return AFC_OK;
}

// Adds the sums of a row block to `total`: of `tiles` tasks for each head of each batch, `width` columns each,
// `pitch` apart. offset(b, h, c) is the place of a column, -1 for none.
template <class Offset>
AFC_FN void add_rows(double *total, const double *sums, int pitch, int64_t batch, int64_t heads, int64_t tiles,
                     int width, Offset offset) {
  for (int64_t task = 0; task < batch * heads * tiles; ++task) {
    const int64_t head = task / tiles;
    for (int c = 0; c < width; ++c) {
      const int64_t at = offset(head / heads, head % heads, c);
      if (at >= 0) total[at] += sums[task * pitch + c];
    }
  }
}

}  // namespace afc
#endif  // AFC_CPU_CAPTURED_HPP
