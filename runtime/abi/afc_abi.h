// SPDX-License-Identifier: Apache-2.0
//
// The call interface of every module that afc builds: one versioned argument structure, used by the Python glue,
// by C and C++ callers, by the generated host code and, passed by value, by the GPU kernels themselves.
//
// Plain C, no dependencies. A field that a module does not support must be left zero; setting it is an error by
// name (AFC_UNSUPPORTED), never ignored. Fields are only ever added at the end, with a new AFC_ABI_VERSION.
#ifndef AFC_ABI_H
#define AFC_ABI_H

#include <stdint.h>

#define AFC_ABI_VERSION 3
#define AFC_MAX_CAPTURED 8
#define AFC_MAX_SCALARS 8
#define AFC_MAX_BUFFERS 16

enum {  // afc_captured.dtype
  AFC_BOOL = 0, AFC_INT32 = 1, AFC_INT64 = 2, AFC_FLOAT16 = 3, AFC_BFLOAT16 = 4, AFC_FLOAT32 = 5, AFC_FLOAT64 = 6
};

enum {  // afc_args.flags
  AFC_DETERMINISTIC = 1,  // bitwise equal results from equal inputs
  AFC_ACCUMULATE = 2      // gradients are added to what the buffers hold
};

enum {  // status of a call; 0 is success
  AFC_OK = 0, AFC_UNSUPPORTED = 1, AFC_BAD_ARGUMENT = 2, AFC_NO_DRIVER = 3, AFC_NO_KERNEL_FOR_DEVICE = 4, AFC_DRIVER_ERROR = 5
};

// A tensor of rank 4, logical order (batch, head, row, column). Strides count elements, not bytes.
typedef struct afc_tensor {
  void *data;
  int64_t stride[4];
} afc_tensor;

// A captured tensor: rank at most 4, strides in elements.
typedef struct afc_captured {
  void *data;
  int32_t dtype;
  int32_t rank;
  int64_t size[4];
  int64_t stride[4];
} afc_captured;

typedef union afc_scalar {
  int64_t i;
  double f;
} afc_scalar;

typedef struct afc_args {
  uint32_t version;  // AFC_ABI_VERSION
  uint32_t bytes;    // sizeof(afc_args)
  int32_t flags;
  int32_t device;    // CUDA device ordinal, -1 for the CPU
  int64_t B, Hq, Hk, M, N;

  afc_tensor q, k, v, o;         // [B, Hq, M, Dqk]  [B, Hk, N, Dqk]  [B, Hk, N, Dv]  [B, Hq, M, Dv]
  afc_tensor lse;                // [B, Hq, M, 1], natural logarithm
  afc_tensor d_o, dlse;          // incoming gradients (backward)
  afc_tensor dq, dk, dv;         // outgoing gradients (backward)
  afc_captured captured[AFC_MAX_CAPTURED];
  afc_captured grad_captured[AFC_MAX_CAPTURED];
  afc_scalar scalar[AFC_MAX_SCALARS];  // run-time parameters of the attention, in source order

  int64_t q_origin, k_origin;    // position of row 0 of q and of k
  void *workspace;               // afc_workspace(...) bytes, 256-byte aligned; contents undefined before and after
  int64_t workspace_bytes;
  void *stream;                  // CUstream, 0 for the default stream
  int32_t threads;               // CPU threads
  int32_t reserved0;
  void *buffer[AFC_MAX_BUFFERS]; // set by the module: parts of the workspace

  // What follows must be zero unless said otherwise: reserved for later kernels.
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  int64_t max_q, max_k;
  const int32_t *page_table;
  int64_t page_stride, page_size;
  // [B] each, or null; on the device of the call. Origins replace q_origin and k_origin; keys n >= kv_len of a batch
  // are never read, contribute nothing and get gradient 0.
  const int64_t *q_origin_per_batch, *k_origin_per_batch, *kv_len_per_batch;
  const void *q_pos, *k_pos;
  int32_t num_splits, split_index;
  float *o_partial, *lse_partial;
  int32_t out_dtype, reserved1;

  // The output before the output blocks of an attention that has some, [B, Hq, M, Dv]: forward stores it unless
  // it is null, backward reads it and not o. Null in all other modules. Since version 2.
  afc_tensor o_raw;
} afc_args;

// One (attention, shape, dtype, target) configuration of a module.
typedef struct afc_entry {
  const char *name;         // attention
  const char *description;  // JSON: signature, dtypes, head sizes, target, schedule
  int64_t (*workspace)(const afc_args *args, int backward);  // bytes for args->device, or -1
  int (*forward)(const afc_args *args);                      // status; see afc_last_error()
  int (*backward)(const afc_args *args);                     // null where the module was built without it
} afc_entry;

typedef struct afc_module {
  uint32_t abi_version;
  uint32_t entry_count;
  const afc_entry *entries;
  const char *metadata;  // JSON: source name, language edition, compiler, targets
} afc_module;

#ifdef __cplusplus
extern "C" {
#endif
// Exported by every module.
uint32_t afc_abi_version(void);
const afc_module *afc_describe(void);
const char *afc_last_error(void);  // of the calling thread; empty after success
#ifdef __cplusplus
}
#endif
#endif  // AFC_ABI_H
