// ============================================================================
// afc: attention `qwen2_vl` for target sm86, GPUs with at least 99 KB of shared memory a block
// source    qwen2_vl.attn:2
// blocks    mrope(pos = qpos, temporal = Dqk // 8, height = 3 * Dqk // 16, base = 1000000.0) > mrope(pos = kpos, temporal = Dqk // 8, height = 3 * Dqk // 16, base = 1000000.0) on k > causal > softmax
// tensors   q[B, H, M, 128], k[B, Hk, N, 128], v[B, Hk, N, 128], o[B, H, M, 128] bfloat16
// options   qpos[3, 1|B, M] int, kpos[3, 1|B, N] int
// schedule  host code: launches the kernels in order
// rebuild   afc compile qwen2_vl.attn --emit cu
// edit      templates/sm80, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "host/driver.h"
#include "host/status.h"

extern "C" const afc_gpu_images qwen2_vl_cuda_bfloat16_128_128_sm86_images;  // one cubin per architecture

namespace {

// ---- kernels ---------------------------------------------------------------

enum Kernel {
  QWEN2_VL_ROTATE_FORWARD,
  QWEN2_VL_FORWARD,
  QWEN2_VL_ROTATE_BACKWARD,
  QWEN2_VL_PREPROCESS,
  QWEN2_VL_BACKWARD,
  QWEN2_VL_POSTPROCESS,
  QWEN2_VL_BACKWARD_QUERIES,
};

const afc_gpu_kernel kernels[] = {  // symbol, dynamic shared memory, threads, part of the image
    {"qwen2_vl_rotate_forward", 0, 256, 0},
    {"qwen2_vl_forward", 98304, 256, 0},
    {"qwen2_vl_rotate_backward", 0, 256, 1},
    {"qwen2_vl_preprocess", 0, 256, 1},
    {"qwen2_vl_backward", 82432, 256, 1},
    {"qwen2_vl_postprocess", 16896, 256, 1},
    {"qwen2_vl_backward_queries", 65536, 128, 1},
};

afc_gpu_module gpu = {&qwen2_vl_cuda_bfloat16_128_128_sm86_images, kernels, 7};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int launch(Kernel kernel, int64_t x, int64_t y, const afc_args &args) {
  if (x > 2147483647) {
    return afc_fail(AFC_BAD_ARGUMENT, "the call needs %lld blocks, more than one grid holds", (long long)x);
  }
  return afc_gpu_launch(&gpu, kernel, unsigned(x), unsigned(y), 1, &args, 0);
}

// ---- checks ----------------------------------------------------------------

int check_rows(const char *name, const afc_tensor &tensor, int64_t elements) {
  if (elements == 0) return AFC_OK;
  const bool unit_stride = tensor.stride[3] == 1;
  const bool multiples = (tensor.stride[0] | tensor.stride[1] | tensor.stride[2]) % 8 == 0;
  if (tensor.data == nullptr || (uintptr_t)tensor.data % 16 != 0 || !unit_stride || !multiples) {
    return afc_fail(AFC_BAD_ARGUMENT,
                    "%s: expected 16-byte aligned rows: a pointer aligned to 16 bytes, strides that are "
                    "multiples of 8 and a unit last stride",
                    name);
  }
  return AFC_OK;
}

int check(const afc_args &args, bool backward) {
  const int64_t q_rows = args.B * args.Hq * args.M, k_rows = args.B * args.Hk * args.N;
  const int64_t q_size = q_rows * 128, k_size = k_rows * 128;
  const int64_t o_size = q_rows * 128, v_size = k_rows * 128;
  if (args.flags & AFC_ACCUMULATE) {
    return afc_fail(AFC_UNSUPPORTED, "flags: AFC_ACCUMULATE is not supported by this module");
  }
  if (args.o_raw.data != nullptr) {
    return afc_fail(AFC_UNSUPPORTED, "o_raw: this attention has no output block, must be null");
  }
  for (int n = 0; n < AFC_MAX_CAPTURED; ++n) {
    if (args.grad_captured[n].data != nullptr) {
      return afc_fail(AFC_UNSUPPORTED, "grad_captured[%d]: this module computes no gradient of captured tensors", n);
    }
    if ((n < 2) != (args.captured[n].data != nullptr)) {
      return afc_fail(AFC_BAD_ARGUMENT, "captured[%d]: this attention captures 2 tensor(s)", n);
    }
  }
  if (const int dtype = args.captured[0].dtype; !(dtype == AFC_INT32 || dtype == AFC_INT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "qpos: expected elements of type int32 or int64");
  }
  if (const int dtype = args.captured[1].dtype; !(dtype == AFC_INT32 || dtype == AFC_INT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "kpos: expected elements of type int32 or int64");
  }
  if (int status = check_rows("q", args.q, q_size)) return status;
  if (int status = check_rows("k", args.k, k_size)) return status;
  if (int status = check_rows("v", args.v, v_size)) return status;
  if (int status = check_rows("o", args.o, o_size)) return status;
  if (!backward) return AFC_OK;
  if (int status = check_rows("d_o", args.d_o, o_size)) return status;
  if (int status = check_rows("dq", args.dq, q_size)) return status;
  if (int status = check_rows("dk", args.dk, k_size)) return status;
  if (int status = check_rows("dv", args.dv, v_size)) return status;
  return AFC_OK;
}

// ---- workspace -------------------------------------------------------------

// Sets args.buffer to parts of the workspace; returns the bytes that they take.
int64_t place(afc_args &args, bool backward) {
  int64_t at = 0;
  auto take = [&](int index, bool needed, int64_t bytes) {
    if (!needed) return;
    args.buffer[index] = (void *)((uintptr_t)args.workspace + (uintptr_t)at);
    at += ceil_div(bytes, 256) * 256;
  };
  take(0, backward, 2 * (args.B * args.Hq * args.M * 128));  // q_rotated
  take(1, true, 4 * (args.B * args.M * 128));  // q_table
  take(2, true, 2 * (args.B * args.Hk * args.N * 128));  // k_rotated
  take(3, backward, 4 * (args.B * args.N * 128));  // k_table
  take(4, backward, 4 * (args.B * args.Hq * args.M * 2));  // row_terms
  take(5, backward, 4 * (args.B * args.Hq * ((args.M + 15) / 16 * 2048)));  // dq_sum
  return at;
}

int start(afc_args &args, bool backward) {
  if (int status = check(args, backward)) return status;
  const int64_t needed = place(args, backward);
  if (args.workspace_bytes < needed) {
    return afc_fail(AFC_BAD_ARGUMENT, "workspace: expected %lld bytes, got %lld", (long long)needed,
                    (long long)args.workspace_bytes);
  }
  return AFC_OK;
}

}  // namespace

// ---- entry functions -------------------------------------------------------

extern "C" int64_t qwen2_vl_cuda_bfloat16_128_128_sm86_workspace(const afc_args *call, int backward) {
  afc_args args = *call;
  return place(args, backward != 0);
}

extern "C" int qwen2_vl_cuda_bfloat16_128_128_sm86_forward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, false)) return status;
  if (int status = launch(QWEN2_VL_ROTATE_FORWARD, (args.M + 15) / 16 + (args.N + 15) / 16, larger(1, (args.B * args.Hq + 15) / 16), args)) {
    return status;
  }
  if (int status = launch(QWEN2_VL_FORWARD, (args.M + 127) / 128 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}

extern "C" int qwen2_vl_cuda_bfloat16_128_128_sm86_backward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, true)) return status;
  if (args.flags & AFC_DETERMINISTIC) {
    if (int status = launch(QWEN2_VL_ROTATE_BACKWARD, (args.M + 15) / 16 + (args.N + 15) / 16, larger(1, (args.B * args.Hq + 15) / 16), args)) return status;
    if (int status = launch(QWEN2_VL_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(QWEN2_VL_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) return status;
    if (int status = launch(QWEN2_VL_BACKWARD_QUERIES, (args.M + 63) / 64 * args.Hq * args.B, 1, args)) return status;
    return AFC_OK;
  }
  if (int status = launch(QWEN2_VL_ROTATE_BACKWARD, (args.M + 15) / 16 + (args.N + 15) / 16, larger(1, (args.B * args.Hq + 15) / 16), args)) {
    return status;
  }
  if (int status = launch(QWEN2_VL_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN2_VL_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN2_VL_POSTPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}
