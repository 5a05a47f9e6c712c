// SPDX-License-Identifier: Apache-2.0
//
// For C++ programs that call a module of afc: filling afc_args, and statuses as exceptions.
//
//   afc_args args = afc::arguments(B, Hq, Hk, M, N);
//   args.q = afc::tensor(q, Hq, M, D);                       // contiguous [B, Hq, M, D]
//   ...
//   std::vector<std::byte> room(afc::workspace(lm_causal_cpu_float32_64_64_workspace, args, false, lm_last_error));
//   afc::place(&args, room.data(), room.size());
//   afc::call(lm_causal_cpu_float32_64_64_forward, args, lm_last_error);
#ifndef AFC_CALL_HPP
#define AFC_CALL_HPP

#include <stddef.h>
#include <stdint.h>

#include <stdexcept>
#include <string>

#include "abi/afc_abi.h"

namespace afc {

constexpr size_t kWorkspaceAlignment = 256;

// A call that failed. `status` is one of AFC_UNSUPPORTED and those after it.
struct Error : std::runtime_error {
  Error(int status_, const char *text) : std::runtime_error(text), status(status_) {}
  int status;
};

// Arguments of a call on the CPU with one thread, or on the CUDA device `device`; no tensor is set.
inline afc_args arguments(int64_t batch, int64_t q_heads, int64_t k_heads, int64_t queries, int64_t keys,
                          int device = -1) {
  afc_args args = {};
  args.version = AFC_ABI_VERSION;
  args.bytes = sizeof(afc_args);
  args.device = device;
  args.threads = 1;
  args.B = batch;
  args.Hq = q_heads;
  args.Hk = k_heads;
  args.M = queries;
  args.N = keys;
  return args;
}

// A contiguous tensor [batch, heads, rows, columns].
inline afc_tensor tensor(void *data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, {heads * rows * columns, rows * columns, columns, 1}};
}

// Bytes to allocate for the workspace of a call, room for its alignment included.
inline size_t workspace(int64_t (*function)(const afc_args *, int), const afc_args &args, bool backward,
                        const char *(*last_error)()) {
  const int64_t bytes = function(&args, backward);
  if (bytes < 0) throw Error(AFC_BAD_ARGUMENT, last_error());
  return static_cast<size_t>(bytes) + kWorkspaceAlignment;
}

// Hands `bytes` of memory at `room` to a call, from the first aligned address on.
inline void place(afc_args *args, void *room, size_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(room);
  const uintptr_t aligned = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  args->workspace = reinterpret_cast<void *>(aligned);
  args->workspace_bytes = static_cast<int64_t>(bytes - (aligned - address));
}

// Calls forward or backward. Throws Error.
inline void call(int (*function)(const afc_args *), const afc_args &args, const char *(*last_error)()) {
  if (const int status = function(&args)) throw Error(status, last_error());
}

}  // namespace afc

#endif  // AFC_CALL_HPP
