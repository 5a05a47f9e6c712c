// ============================================================================
// afc: attention `qwen3` for target sm86, GPUs with at least 99 KB of shared memory a block
// source    qwen3.attn:2
// blocks    rms_norm(w = qw, eps = 1e-06) > rope(base = 1000000.0) > rms_norm(w = kw, eps = 1e-06) on k > causal > softmax
// tensors   q[B, H, M, 128], k[B, Hk, N, 128], v[B, Hk, N, 128], o[B, H, M, 128] bfloat16
// options   qw[128] float, kw[128] float
// schedule  host code: launches the kernels in order
// rebuild   afc compile qwen3.attn --emit cu
// edit      templates/sm80, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "abi/afc_shares.h"
#include "host/driver.h"
#include "host/gradients.h"
#include "host/status.h"

extern "C" const afc_gpu_images qwen3_cuda_bfloat16_128_128_sm86_images;  // one cubin per architecture

namespace {

// ---- kernels ---------------------------------------------------------------

enum Kernel {
  QWEN3_ROTATE_FORWARD,
  QWEN3_TRANSFORM_FORWARD,
  QWEN3_FORWARD,
  QWEN3_ROTATE_BACKWARD,
  QWEN3_TRANSFORM_BACKWARD,
  QWEN3_CLEAR,
  QWEN3_PREPROCESS,
  QWEN3_BACKWARD,
  QWEN3_POSTPROCESS,
  QWEN3_POSTPROCESS_KEYS,
  QWEN3_POSTPROCESS_SUM,
  QWEN3_POSTPROCESS_KEYS_SUM,
  QWEN3_BACKWARD_QUERIES,
};

const afc_gpu_kernel kernels[] = {  // symbol, dynamic shared memory, threads, part of the image
    {"qwen3_rotate_forward", 0, 256, 0},
    {"qwen3_transform_forward", 16896, 256, 0},
    {"qwen3_forward", 98304, 256, 0},
    {"qwen3_rotate_backward", 0, 256, 1},
    {"qwen3_transform_backward", 16896, 256, 1},
    {"qwen3_clear", 0, 256, 1},
    {"qwen3_preprocess", 0, 256, 1},
    {"qwen3_backward", 82432, 256, 1},
    {"qwen3_postprocess", 25600, 128, 1},
    {"qwen3_postprocess_keys", 25600, 128, 1},
    {"qwen3_postprocess_sum", 0, 256, 1},
    {"qwen3_postprocess_keys_sum", 0, 256, 1},
    {"qwen3_backward_queries", 65536, 128, 1},
};

afc_gpu_module gpu = {&qwen3_cuda_bfloat16_128_128_sm86_images, kernels, 13};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- shares of the kernels that sum gradients of captured tensors -----------

// How the blocks of qwen3_postprocess share out its rows.
AFC_FN void qwen3_postprocess_shares(const afc_args &args, Shares &shares) {
  shares.begin(args.B, args.Hq, (args.M + 15) / 16);
  shares.add(args.grad_captured[0], -1, -1, -1, args.M);  // qw
  shares.split();
}

// How the blocks of qwen3_postprocess_keys share out its rows.
AFC_FN void qwen3_postprocess_keys_shares(const afc_args &args, Shares &shares) {
  shares.begin(args.B, args.Hk, (args.N + 15) / 16);
  shares.add(args.grad_captured[1], -1, -1, -1, args.N);  // kw
  shares.split();
}

Shares shares_of(void (*compute)(const afc_args &, Shares &), const afc_args &args) {
  Shares shares;
  compute(args, shares);
  return shares;
}

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
    if (args.grad_captured[n].data != nullptr && !(backward && (n == 0 || n == 1))) {
      return afc_fail(AFC_UNSUPPORTED, "grad_captured[%d]: this module computes no gradient of this captured tensor", n);
    }
    if ((n < 2) != (args.captured[n].data != nullptr)) {
      return afc_fail(AFC_BAD_ARGUMENT, "captured[%d]: this attention captures 2 tensor(s)", n);
    }
  }
  if (const int dtype = args.captured[0].dtype; !(dtype >= AFC_FLOAT16 && dtype <= AFC_FLOAT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "qw: expected elements of type float16, bfloat16, float32 or float64");
  }
  if (const int dtype = args.captured[1].dtype; !(dtype >= AFC_FLOAT16 && dtype <= AFC_FLOAT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "kw: expected elements of type float16, bfloat16, float32 or float64");
  }
  if (int status = afc_check_gradient(args, 0, AFC_FLOAT32)) return status;
  if (int status = afc_check_gradient(args, 1, AFC_FLOAT32)) return status;
  if (gradient_size(args.grad_captured[0]) > 2147483647) {
    return afc_fail(AFC_UNSUPPORTED, "grad_captured[0]: expected at most 2147483647 elements");
  }
  if (gradient_size(args.grad_captured[1]) > 2147483647) {
    return afc_fail(AFC_UNSUPPORTED, "grad_captured[1]: expected at most 2147483647 elements");
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
  take(0, true, 2 * (args.B * args.Hq * args.M * 128));  // q_rotated
  take(1, true, 4 * ((args.q_origin_per_batch != nullptr ? larger(args.B, 1) : 1) * (args.M * 128)));  // q_table
  take(2, true, 2 * (args.B * args.Hk * args.N * 128));  // k_rotated
  take(3, true, 4 * ((args.k_origin_per_batch != nullptr ? larger(args.B, 1) : 1) * (args.N * 128)));  // k_table
  take(4, backward, 4 * (args.B * args.Hq * args.M * 2));  // row_terms
  take(5, backward, 4 * (args.B * args.Hq * ((args.M + 15) / 16 * 2048)));  // dq_sum
  take(6, backward, 4 * (args.B * args.Hk * args.N * 128));  // dk_sum
  take(7, backward, 4 * (shares_of(qwen3_postprocess_shares, args).floats()));  // copies of qwen3_postprocess
  take(8, backward, 4 * (shares_of(qwen3_postprocess_keys_shares, args).floats()));  // copies of qwen3_postprocess_keys
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

extern "C" int64_t qwen3_cuda_bfloat16_128_128_sm86_workspace(const afc_args *call, int backward) {
  afc_args args = *call;
  return place(args, backward != 0);
}

extern "C" int qwen3_cuda_bfloat16_128_128_sm86_forward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, false)) return status;
  if (int status = launch(QWEN3_ROTATE_FORWARD, (args.M + 15) / 16 + (args.N + 15) / 16, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_TRANSFORM_FORWARD, (args.M + 31) / 32 * args.Hq * args.B + (args.N + 31) / 32 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_FORWARD, (args.M + 127) / 128 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}

extern "C" int qwen3_cuda_bfloat16_128_128_sm86_backward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, true)) return status;
  if (args.flags & AFC_DETERMINISTIC) {
    if (int status = launch(QWEN3_ROTATE_BACKWARD, (args.M + 15) / 16 + (args.N + 15) / 16, 1, args)) return status;
    if (int status = launch(QWEN3_TRANSFORM_BACKWARD, (args.M + 31) / 32 * args.Hq * args.B + (args.N + 31) / 32 * args.Hk * args.B, 1, args)) return status;
    if (int status = launch(QWEN3_CLEAR, 256, 1, args)) return status;
    if (int status = launch(QWEN3_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(QWEN3_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) return status;
    if (int status = launch(QWEN3_BACKWARD_QUERIES, (args.M + 63) / 64 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(QWEN3_POSTPROCESS, shares_of(qwen3_postprocess_shares, args).blocks(), 1, args)) return status;
    if (int status = launch(QWEN3_POSTPROCESS_KEYS, shares_of(qwen3_postprocess_keys_shares, args).blocks(), 1, args)) return status;
    if (int status = launch(QWEN3_POSTPROCESS_SUM, ceil_div(shares_of(qwen3_postprocess_shares, args).largest(), 8), 1, args)) return status;
    if (int status = launch(QWEN3_POSTPROCESS_KEYS_SUM, ceil_div(shares_of(qwen3_postprocess_keys_shares, args).largest(), 8), 1, args)) return status;
    return AFC_OK;
  }
  if (int status = launch(QWEN3_ROTATE_BACKWARD, (args.M + 15) / 16 + (args.N + 15) / 16, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_TRANSFORM_BACKWARD, (args.M + 31) / 32 * args.Hq * args.B + (args.N + 31) / 32 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_CLEAR, 256, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_POSTPROCESS, shares_of(qwen3_postprocess_shares, args).blocks(), 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_POSTPROCESS_KEYS, shares_of(qwen3_postprocess_keys_shares, args).blocks(), 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_POSTPROCESS_SUM, ceil_div(shares_of(qwen3_postprocess_shares, args).largest(), 8), 1, args)) {
    return status;
  }
  if (int status = launch(QWEN3_POSTPROCESS_KEYS_SUM, ceil_div(shares_of(qwen3_postprocess_keys_shares, args).largest(), 8), 1, args)) {
    return status;
  }
  return AFC_OK;
}
