// SPDX-License-Identifier: Apache-2.0
//
// What an entry function does before it computes: checks of its own arguments and the parts of its workspace.
// Version, sizes, positions and the fields that no module supports are checked by afc_call() of the host.
#ifndef AFC_CPU_CALL_HPP
#define AFC_CPU_CALL_HPP

#include "abi/afc_abi.h"
#include "host/status.h"
#include "math.hpp"

namespace afc {

constexpr int64_t BUFFER_ALIGNMENT = 256;

// Parts of the workspace, one after the other. With a null workspace only `bytes` is meaningful.
struct Cursor {
  void *workspace;
  int64_t bytes;

  template <class T> T *take(int64_t count) {
    const int64_t at = bytes;
    bytes += (count * int64_t(sizeof(T)) + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
    return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(workspace) + uintptr_t(at));
  }
};

// A tensor of the call: its name, the number of its elements, the width of its rows, and whether the stride
// between the elements of a row may be other than one.
struct NamedTensor {
  const char *name;
  const afc_tensor *tensor;
  int64_t elements;
  int64_t width;
  bool any_stride;
};

AFC_FN int check_tensor(const NamedTensor &t) {
  if (t.elements == 0) return AFC_OK;
  if (t.tensor->data == nullptr) {
    return afc_fail(AFC_BAD_ARGUMENT, "%s: expected data, got a null pointer", t.name);
  }
  if (t.width > 1 && !t.any_stride && t.tensor->stride[3] != 1) {
    return afc_fail(AFC_BAD_ARGUMENT, "%s: expected stride 1 in the last dimension, got %lld", t.name,
                    static_cast<long long>(t.tensor->stride[3]));
  }
  return AFC_OK;
}

AFC_FN int check_tensors(const afc_args &args, bool backward, int64_t head_qk, int64_t head_v, bool has_output) {
  const int64_t q_rows = args.B * args.Hq * args.M, k_rows = args.B * args.Hk * args.N;
  const bool raw = backward && has_output;  // what backward reads instead of the output
  const NamedTensor tensors[] = {
      {"q", &args.q, q_rows * head_qk, head_qk, false},
      {"k", &args.k, k_rows * head_qk, head_qk, false},
      {"v", &args.v, k_rows * head_v, head_v, false},
      {raw ? "o_raw" : "o", raw ? &args.o_raw : &args.o, q_rows * head_v, head_v, false},
      {"lse", &args.lse, q_rows, 1, false},
      {"d_o", &args.d_o, q_rows * head_v, head_v, true},
      {"dq", &args.dq, q_rows * head_qk, head_qk, false},
      {"dk", &args.dk, k_rows * head_qk, head_qk, false},
      {"dv", &args.dv, k_rows * head_v, head_v, false},
  };
  const int count = backward ? 9 : 5;
  for (int k = 0; k < count; ++k) {
    if (int status = check_tensor(tensors[k])) return status;
  }
  return AFC_OK;
}

// Captured tensors: the first `captured` are the attention's own; no other may be set. Those with a bit in
// `gradients` may take a gradient.
AFC_FN int check_captured(const afc_args &args, int captured, unsigned gradients) {
  for (int k = 0; k < AFC_MAX_CAPTURED; ++k) {
    if (args.grad_captured[k].data != nullptr && (gradients >> k & 1) == 0) {
      return afc_fail(AFC_UNSUPPORTED,
                      "grad_captured[%d]: this module computes no gradient of this captured tensor", k);
    }
    if (k >= captured && args.captured[k].data != nullptr) {
      return afc_fail(AFC_BAD_ARGUMENT, "captured[%d]: expected %d captured tensors, got more", k, captured);
    }
  }
  return AFC_OK;
}

// A value per batch, where the call has one: the smallest and the largest that is allowed.
AFC_FN int check_per_batch(const char *name, const int64_t *values, int64_t batch, int64_t low, int64_t high) {
  for (int64_t b = 0; values != nullptr && b < batch; ++b) {
    if (values[b] >= low && values[b] <= high) continue;
    return afc_fail(AFC_BAD_ARGUMENT, "%s: expected values in %lld..%lld, got %lld for batch %lld", name,
                    static_cast<long long>(low), static_cast<long long>(high),
                    static_cast<long long>(values[b]), static_cast<long long>(b));
  }
  return AFC_OK;
}

AFC_FN int check_positions(const afc_args &args) {
  constexpr int64_t largest = (int64_t(1) << 30) - 1;  // as for the origins of a whole call
  if (int status = check_per_batch("q_origin", args.q_origin_per_batch, args.B, -largest, largest - args.M)) {
    return status;
  }
  if (int status = check_per_batch("k_origin", args.k_origin_per_batch, args.B, -largest, largest - args.N)) {
    return status;
  }
  return check_per_batch("kv_len", args.kv_len_per_batch, args.B, 0, args.N);
}

AFC_FN int check_workspace(const afc_args &args, int64_t needed) {
  if (args.workspace == nullptr) {
    return afc_fail(AFC_BAD_ARGUMENT, "workspace: expected %lld bytes, got a null pointer",
                    static_cast<long long>(needed));
  }
  if (args.workspace_bytes < needed) {
    return afc_fail(AFC_BAD_ARGUMENT, "workspace: expected %lld bytes for %d threads, got %lld",
                    static_cast<long long>(needed), args.threads,
                    static_cast<long long>(args.workspace_bytes));
  }
  if (reinterpret_cast<uintptr_t>(args.workspace) % uintptr_t(BUFFER_ALIGNMENT) != 0) {
    return afc_fail(AFC_BAD_ARGUMENT, "workspace: expected an address aligned to %d bytes, got %p",
                    int(BUFFER_ALIGNMENT), args.workspace);
  }
  return AFC_OK;
}

AFC_FN int check_threads(const afc_args &args) {
  if (args.threads >= 1) return AFC_OK;
  return afc_fail(AFC_BAD_ARGUMENT, "threads: expected at least 1, got %d", args.threads);
}

// Where and how the call runs.
AFC_FN int check_execution(const afc_args &args) {
  if (args.device != -1) {
    return afc_fail(AFC_BAD_ARGUMENT, "device: expected -1 (the CPU), got %d", args.device);
  }
  if (args.stream != nullptr) {
    return afc_fail(AFC_UNSUPPORTED, "stream: expected none on the CPU, got %p", args.stream);
  }
  if (int status = check_threads(args)) return status;
  if (args.flags & AFC_ACCUMULATE) {
    return afc_fail(AFC_UNSUPPORTED, "flags: AFC_ACCUMULATE is not supported by this module");
  }
  return AFC_OK;
}

// The output before its blocks, which forward stores only where it is asked for.
AFC_FN int check_raw_output(const afc_args &args, int64_t head_v, bool has_output) {
  if (args.o_raw.data == nullptr) return AFC_OK;
  if (!has_output) {
    return afc_fail(AFC_UNSUPPORTED, "o_raw: this attention has no output block, must be null");
  }
  return check_tensor({"o_raw", &args.o_raw, args.B * args.Hq * args.M * head_v, head_v, false});
}

// `has_output`: the attention has output blocks.
AFC_FN int check_call(const afc_args &args, bool backward, int64_t head_qk, int64_t head_v, int captured,
                      int64_t needed, unsigned gradients = 0, bool has_output = false) {
  if (int status = check_execution(args)) return status;
  if (int status = check_raw_output(args, head_v, has_output)) return status;
  if (int status = check_tensors(args, backward, head_qk, head_v, has_output)) return status;
  if (int status = check_captured(args, captured, backward ? gradients : 0)) return status;
  if (int status = check_positions(args)) return status;
  return check_workspace(args, needed);
}

// ---- what differs between the batches of a call -------------------------------------------------

// Number of keys of a batch: rows of k and v from here on are never read.
AFC_FN int64_t key_count(const afc_args &args, int64_t b) {
  return args.kv_len_per_batch != nullptr ? args.kv_len_per_batch[b] : args.N;
}

// The arguments with the origins of batch b; a copy in `own` only where batches have their own.
AFC_FN const afc_args &args_of_batch(const afc_args &args, int64_t b, afc_args &own) {
  if (args.q_origin_per_batch == nullptr && args.k_origin_per_batch == nullptr) return args;
  own = args;
  if (args.q_origin_per_batch != nullptr) own.q_origin = args.q_origin_per_batch[b];
  if (args.k_origin_per_batch != nullptr) own.k_origin = args.k_origin_per_batch[b];
  return own;
}

}  // namespace afc
#endif  // AFC_CPU_CALL_HPP
